"""Raw input files: finds them, splits them into parts, and reads rows from a range of a file.

Formats are JSON lines (``.jsonl``, ``.ndjson``, ``.json``; optionally ``.gz``), CSV with a header (optionally ``.gz``)
and Parquet. JSON lines are split at line breaks and Parquet at row groups; CSV and compressed files are not split. The
split depends on the files and the part size only, not on the number of processes.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
from pyarrow import parquet

from spotune.errors import JobError

FileFormat = Literal["jsonl", "csv", "parquet"]
RawRow = dict[str, Any]

_FORMATS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_ROWS_PER_READ = 1024
_ONE_PART = 1 << 62  # bytes: the files are not split


@dataclass(frozen=True)
class InputFile:
    """A file of raw rows and its format."""

    path: Path
    format: FileFormat

    @property
    def compressed(self) -> bool:
        """Whether the file is gzipped."""
        return self.path.suffix == ".gz"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class FileRange:
    """Consecutive rows of one file, as the half-open range [start, stop).

    Attributes:
        file: The file.
        start: First byte (uncompressed JSON lines) or row group (Parquet); 0 for files that are not split.
        stop: Byte or row group after the last one; -1 for files that are not split.
        size: Bytes on disk, for progress.
    """

    file: InputFile
    start: int
    stop: int
    size: int

    def rows(self, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
        """The rows with their number in this range, from 1. In text files it is the number of the line.

        Args:
            columns: Columns that are needed. Of Parquet files, only these are read.

        Raises:
            JobError: The file is damaged or malformed. The message names file and line.
        """
        readers = {"jsonl": _read_json_lines, "csv": _read_csv, "parquet": _read_parquet}
        return readers[self.file.format](self, columns)

    def location(self, number: int) -> str:
        """A row's location for error messages: ``file:line``, or ``file, row n`` for Parquet."""
        path = self.file.path
        if self.file.format == "parquet":
            metadata = parquet.read_metadata(path)
            return f"{path}, row {number + sum(metadata.row_group(group).num_rows for group in range(self.start))}"
        return f"{path}:{number + _lines_before(path, self.start)}"


Part = tuple[FileRange, ...]


def find_inputs(sources: Sequence[str | Path]) -> list[InputFile]:
    """The input files that paths, folders and patterns such as ``data/*.jsonl`` name.

    Returns:
        Each file once, in the order of ``sources``; files of one folder or pattern are sorted by path.

    Raises:
        JobError: A source matches no file, a file has an unknown format, or formats are mixed.
    """
    files = [file for source in sources for file in _expand(str(source))]
    found = list({file.path.resolve(): file for file in files}.values())
    formats = {file.format: file for file in found}
    if len(formats) > 1:
        one, other, *_ = formats.values()
        raise JobError(f"the input mixes file formats: {one.path} and {other.path}; prepare each format separately")
    return found


def columns_of_files(files: Sequence[InputFile]) -> frozenset[str]:
    """Columns that every Parquet or CSV file has; empty for JSON lines, whose rows name their columns themselves.

    Raises:
        JobError: A file is damaged.
    """
    headers = [frozenset(types) for types in map(_column_types, files) if types is not None]
    return frozenset.intersection(*headers) if headers else frozenset()


def split_into_parts(files: Sequence[InputFile], columns: Collection[str], part_size: int) -> list[Part]:
    """Split the files into parts of about ``part_size`` bytes on disk.

    Raises:
        JobError: A file is damaged or lacks one of ``columns``, or a column's type differs between files.
    """
    _check_same_columns(files, columns)
    parts: list[Part] = []
    part: list[FileRange] = []
    for file_range in (file_range for file in files for file_range in _split_file(file, part_size)):
        if part and sum(other.size for other in part) + file_range.size > part_size:
            parts.append(tuple(part))
            part = []
        part.append(file_range)
    return [*parts, tuple(part)] if part else parts


def rows_in_order(sources: Sequence[str | Path], columns: Collection[str]) -> Iterator[tuple[FileRange, int, RawRow]]:
    """All rows of all inputs: the range of a file, the number of the row in it, and the row.

    Raises:
        JobError: see `find_inputs`, `split_into_parts` and `FileRange.rows`.
    """
    for part in split_into_parts(find_inputs(sources), columns, _ONE_PART):
        for file_range in part:
            for number, row in file_range.rows(columns):
                yield file_range, number, row


def _expand(source: str) -> list[InputFile]:
    if "://" in source:
        raise JobError(f"raw data must be in files or folders, not at {source}; copy it to a path first")
    path = Path(source)
    if path.is_dir():
        paths = [found for found in sorted(path.rglob("*")) if _format_of(found) and found.is_file()]
        if not paths:
            raise JobError(f"the folder {source} has no .jsonl, .csv or .parquet files")
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(found) for found in sorted(glob.glob(source, recursive=True)) if Path(found).is_file()]  # noqa: PTH207
        if not paths:
            raise JobError(f"no file or folder matches {source}")
    return [_input_file(found) for found in paths]


def _input_file(path: Path) -> InputFile:
    file_format = _format_of(path)
    if file_format is None:
        raise JobError(f"{path} has an unknown format; use .jsonl, .csv (each also as .gz) or .parquet")
    return InputFile(path, file_format)


def _format_of(path: Path) -> FileFormat | None:
    return None if path.name.startswith(".") else _FORMATS.get(Path(path.name.removesuffix(".gz")).suffix)


def _split_file(file: InputFile, part_size: int) -> list[FileRange]:
    if file.format == "parquet":
        return _split_parquet(file, part_size)
    if file.format == "csv" or file.compressed or file.size <= part_size:
        return [FileRange(file, 0, file.size if file.format == "jsonl" and not file.compressed else -1, file.size)]
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


def _read_json_lines(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    with _open_binary(file_range.file) as stream:
        stream.seek(file_range.start)
        position = file_range.start
        for number, line in enumerate(_lines(stream, file_range), start=1):
            if 0 <= file_range.stop <= position:
                return
            position += len(line)
            if line.strip():
                yield number, _parse_json(file_range, number, line)


def _lines(stream: gzip.GzipFile | io.BufferedReader, file_range: FileRange) -> Iterator[bytes]:
    try:
        yield from stream
    except (EOFError, gzip.BadGzipFile) as error:
        raise JobError(f"{file_range.file.path} is not a complete gzip file: {error}") from error


def _parse_json(file_range: FileRange, number: int, line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 and file_range.start == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise JobError(f"{file_range.location(number)}: not UTF-8 text (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        hint = "; this looks like one JSON array: write one object per line" if line.lstrip()[:1] == b"[" else ""
        raise JobError(
            f"{file_range.location(number)}: invalid JSON at column {error.colno}: {error.msg}{hint}"
        ) from error
    if not isinstance(row, dict):
        raise JobError(
            f"{file_range.location(number)}: a line must hold one JSON object with the columns, not a {_json_type(row)}"
        )
    return row


def _read_csv(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    csv.field_size_limit(sys.maxsize)
    with _open_text(file_range.file) as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, [])
            for fields in reader:
                if fields and len(fields) != len(header):
                    place = file_range.location(reader.line_num)
                    raise JobError(f"{place}: {len(fields)} fields, but the header names {len(header)} columns")
                if fields:
                    yield reader.line_num, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise JobError(f"{file_range.location(reader.line_num)}: invalid CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise JobError(f"{file_range.file.path}:{_undecodable_line(file_range.file)}: not UTF-8 text") from error
        except (EOFError, gzip.BadGzipFile) as error:
            raise JobError(f"{file_range.file.path} is not a complete gzip file: {error}") from error


def _read_parquet(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    number = 0
    try:
        with parquet.ParquetFile(file_range.file.path) as content:
            groups = list(range(file_range.start, file_range.stop))
            for batch in content.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=sorted(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(
            f"{file_range.file.path} is damaged after row {number} of this part: {_one_line(error)}"
        ) from error
    except UnicodeDecodeError as error:
        raise JobError(f"{file_range.location(number + 1)} or one of the rows after it: not UTF-8 text") from error


def _check_same_columns(files: Sequence[InputFile], columns: Collection[str]) -> None:
    """Raise JobError if a file lacks a needed column, or if its type differs from that in an earlier file."""
    known: dict[str, str] = {}
    for file in files:
        types = _column_types(file)
        if types is None:
            continue
        for column in sorted(columns):
            if column not in types:
                place = f"{file.path}:1" if file.format == "csv" else file.path
                raise JobError(f"{place}: no column {column!r}; the file has {', '.join(map(repr, types)) or 'none'}")
            if known.setdefault(column, types[column]) != types[column]:
                raise JobError(
                    f"{file.path}: column {column!r} is {types[column]}, but {known[column]} in {files[0].path}: "
                    "all input files must have the same columns"
                )


def _column_types(file: InputFile) -> dict[str, str] | None:
    """Type of each column from the file's header; None for files without one (JSON lines, empty CSV files)."""
    if file.format == "jsonl":
        return None
    if file.format == "parquet":
        try:
            return {field.name: str(field.type) for field in parquet.read_schema(file.path)}
        except (pyarrow.ArrowException, OSError) as error:
            raise JobError(f"{file.path} is not a Parquet file, or damaged: {_one_line(error)}") from error
    try:
        with _open_text(file) as stream:
            header = next(csv.reader(stream), None)
    except UnicodeDecodeError as error:
        raise JobError(f"{file.path}:{_undecodable_line(file)}: not UTF-8 text") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise JobError(f"{file.path} is not a complete gzip file: {error}") from error
    if header is not None and len(set(header)) < len(header):
        raise JobError(f"{file.path}:1: two columns have the same name: {', '.join(header)}")
    return None if header is None else dict.fromkeys(header, "text")


def _open_binary(file: InputFile) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(file.path, "rb") if file.compressed else file.path.open("rb")


def _open_text(file: InputFile) -> IO[str]:
    if file.compressed:
        return gzip.open(file.path, "rt", encoding="utf-8-sig", newline="")
    return file.path.open(encoding="utf-8-sig", newline="")


def _undecodable_line(file: InputFile) -> int:
    with _open_binary(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


def _lines_before(path: Path, offset: int) -> int:
    with path.open("rb") as stream:
        lines, left = 0, offset
        while left and (block := stream.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(value), "value")
