"""Raw input: finds the files, and splits them into parts.

JSON lines are split at line breaks and Parquet at row groups; other formats, compressed files and files in stores are
not split. The split depends on the files and the part size only, not on the number of processes.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pyarrow import parquet

from spotune.errors import JobError
from spotune.job.dataset import PrepareSpec
from spotune_trainer.data.preparation.raw_files import NAMES, FileRange, InputFile, format_of
from spotune_trainer.data.preparation.readers import RawRow, check_columns, column_types, read_rows
from spotune_trainer.data.stores.find import find_stored_files
from spotune_trainer.data.stores.stored_file import StoredFile

_ONE_PART = 1 << 62  # bytes: the files are not split

RawInput = str | Path | PrepareSpec
"""Where raw rows are: path, folder, pattern or URL; of a dataset on the Hub also its configuration and split."""

Part = tuple[FileRange, ...]


def part_name(number: int) -> str:
    """The name of a part's staging folder, counted from 0."""
    return f"part-{number:05d}"


def find_inputs(sources: Sequence[RawInput]) -> list[InputFile]:
    """The input files that paths, folders, URLs and patterns such as ``data/*.jsonl`` name.

    Returns:
        Each file once, in the order of ``sources``; files of one folder or pattern are sorted by path.

    Raises:
        JobError: A source matches no file, a file has an unknown format, formats are mixed, or access is denied. Or a
            dataset has several splits, and none was chosen.
        InfrastructureError: A store did not answer.
    """
    files = [file for source in sources for file in _expand(source)]
    found = list({_identity(file): file for file in files}.values())
    formats = {file.format: file for file in found}
    if len(formats) > 1:
        one, other, *_ = formats.values()
        raise JobError(f"the input mixes file formats: {one.name} and {other.name}; prepare each format separately")
    return found


def columns_of_files(files: Sequence[InputFile]) -> frozenset[str]:
    """Columns that every file with a header has; empty for JSON lines, whose rows name their columns themselves.

    Files in stores are downloaded for it.

    Raises:
        JobError: A file is damaged.
    """
    headers = [frozenset(types) for types in map(_types_of, files) if types is not None]
    return frozenset.intersection(*headers) if headers else frozenset()


def split_into_parts(files: Sequence[InputFile], columns: Collection[str], part_size: int) -> list[Part]:
    """Split the files into parts of about ``part_size`` bytes. A file in a store is at most one part.

    Raises:
        JobError: A local file is damaged or lacks one of ``columns``, or a column's type differs between local files.
            Of a file in a store this is checked when its rows are read.
    """
    _check_same_columns([file for file in files if file.stored is None], columns)
    parts: list[Part] = []
    part: list[FileRange] = []
    for file_range in (file_range for file in files for file_range in _split_file(file, part_size)):
        if part and sum(other.size for other in part) + file_range.size > part_size:
            parts.append(tuple(part))
            part = []
        part.append(file_range)
    return [*parts, tuple(part)] if part else parts


def as_one_part(files: Sequence[InputFile], columns: Collection[str]) -> Part:
    """The files as one part, for a process that reads all rows; see `split_into_parts`."""
    (part,) = split_into_parts(files, columns, _ONE_PART)
    return part


def rows_in_order(sources: Sequence[RawInput], columns: Collection[str]) -> Iterator[tuple[FileRange, int, RawRow]]:
    """All rows of all inputs: the range of a file, the number of the row in it, and the row.

    Raises:
        JobError: see `find_inputs`, `split_into_parts` and `read_rows`.
    """
    for file_range in as_one_part(find_inputs(sources), columns):
        for number, row in read_rows(file_range, columns):
            yield file_range, number, row


def _expand(given: RawInput) -> list[InputFile]:
    spec = given if isinstance(given, PrepareSpec) else None
    source = spec.source if spec is not None else str(given)
    if "://" in source:
        return _expand_url(source, *((spec.config, spec.split) if spec is not None else ("", "")))
    path = Path(source)
    if path.is_dir():
        paths = [found for found in sorted(path.rglob("*")) if format_of(found.name) and found.is_file()]
        if not paths:
            raise JobError(f"the folder {source} has no {NAMES} files: put the rows there, or name another folder")
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(found) for found in sorted(glob.glob(source, recursive=True)) if Path(found).is_file()]  # noqa: PTH207
        if not paths:
            raise JobError(f"no file or folder matches {source}: correct the path or pattern, or put the files there")
    return [_input_file(found, None) for found in paths]


def _expand_url(source: str, config: str, split: str) -> list[InputFile]:
    found = find_stored_files(source, config, split, lambda name: format_of(name) is not None)
    if any(character in source for character in "*?[") or (len(found) == 1 and found[0].url == source):
        return [_input_file(_name_of(file), file) for file in found]
    known = [file for file in found if format_of(_name_of(file).name)]
    if not known:
        raise JobError(f"{source} has no {NAMES} files: put the rows there, or name another folder")
    return [_input_file(_name_of(file), file) for file in known]


def _name_of(file: StoredFile) -> Path:
    return Path(file.url.rpartition("/")[2])


def _input_file(path: Path, stored: StoredFile | None) -> InputFile:
    file_format = format_of(path.name)
    if file_format is None:
        raise JobError(f"{stored.url if stored else path} has an unknown format; use {NAMES}")
    return InputFile(path, file_format, stored)


def _identity(file: InputFile) -> str:
    return str(file.path.resolve()) if file.stored is None else file.stored.url


def _split_file(file: InputFile, part_size: int) -> list[FileRange]:
    if file.format == "parquet" and file.stored is None:
        return _split_parquet(file, part_size)
    if file.format != "jsonl" or file.compressed or file.stored is not None:
        return [FileRange(file, 0, -1, file.size)]
    if file.size <= part_size:
        return [FileRange(file, 0, file.size, file.size)]
    offsets = [0]
    with file.path.open("rb") as stream:
        while offsets[-1] < file.size:
            stream.seek(min(offsets[-1] + part_size, file.size))
            stream.readline()
            offsets.append(stream.tell())
    return [FileRange(file, start, stop, stop - start) for start, stop in pairwise(offsets)]


def _split_parquet(file: InputFile, part_size: int) -> list[FileRange]:
    metadata = parquet.read_metadata(file.path)
    ranges: list[FileRange] = []
    start, size = 0, 0
    for group in range(metadata.num_row_groups):
        group_size = metadata.row_group(group).total_byte_size
        if size and size + group_size > part_size:
            ranges.append(FileRange(file, start, group, size))
            start, size = group, 0
        size += group_size
    return [*ranges, FileRange(file, start, metadata.num_row_groups, size)]


def _check_same_columns(files: Sequence[InputFile], columns: Collection[str]) -> None:
    """Raise JobError if a file lacks a needed column, or if its type differs from that in an earlier file."""
    known: dict[str, str] = {}
    for file in files:
        types = column_types(file)
        if types is None:
            continue
        check_columns(file, types, columns)
        for column in sorted(columns):
            if known.setdefault(column, types[column]) != types[column]:
                raise JobError(
                    f"{file.name}: column {column!r} is {types[column]}, but {known[column]} in {files[0].name}: "
                    "write all input files with the same columns"
                )


def _types_of(file: InputFile) -> dict[str, str] | None:
    with file.on_this_node() as local:
        return column_types(local)
