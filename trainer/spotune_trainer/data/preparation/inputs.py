"""Raw text files as rows: which files there are, how they are cut into parts, and reading one piece of a file.

Files are JSON lines (``.jsonl``, ``.ndjson``, ``.json``; optionally ``.gz``), CSV with a header (optionally ``.gz``) or
Parquet. JSON lines are cut at line ends, Parquet at row groups, everything else is read by the file. The cut depends on
the files alone, never on the number of processes.
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

Kind = Literal["jsonl", "csv", "parquet"]
RawRow = dict[str, Any]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_ROWS_PER_READ = 1024


@dataclass(frozen=True)
class InputFile:
    """A file of raw rows."""

    path: Path
    kind: Kind

    @property
    def compressed(self) -> bool:
        """Whether the whole file is gzipped."""
        return self.path.suffix == ".gz"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Piece:
    """A contiguous run of rows of one file.

    Attributes:
        file: The file.
        begin: First byte of uncompressed JSON lines, first row group of Parquet, 0 for files that are read whole.
        end: Byte or row group after the last one; -1 for files that are read whole.
        size: Bytes on disk, for progress.
    """

    file: InputFile
    begin: int
    end: int
    size: int

    def rows(self, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
        """The rows with their number within this piece, from 1 (lines of text files count, not rows).

        Args:
            columns: Columns that are needed; Parquet reads no others.

        Raises:
            JobError: The file cannot be read as what it is; names file and line.
        """
        readers = {"jsonl": _read_json_lines, "csv": _read_csv, "parquet": _read_parquet}
        return readers[self.file.kind](self, columns)

    def place(self, number: int) -> str:
        """Where a row is: ``file:line``, or ``file, row n`` for Parquet."""
        path = self.file.path
        if self.file.kind == "parquet":
            metadata = parquet.read_metadata(path)
            return f"{path}, row {number + sum(metadata.row_group(group).num_rows for group in range(self.begin))}"
        return f"{path}:{number + _lines_before(path, self.begin)}"


Part = tuple[Piece, ...]


def find_inputs(sources: Sequence[str | Path]) -> list[InputFile]:
    """The files that paths, folders and patterns such as ``data/*.jsonl`` stand for, each once, in sorted order.

    Raises:
        JobError: Nothing was found, a file is of an unknown kind, or kinds are mixed.
    """
    files = [file for source in sources for file in _expand(str(source))]
    found = list({file.path.resolve(): file for file in files}.values())
    kinds = {file.kind: file for file in found}
    if len(kinds) > 1:
        one, other, *_ = kinds.values()
        raise JobError(f"the input mixes kinds of files: {one.path} and {other.path}; prepare each kind on its own")
    return found


def cut(files: Sequence[InputFile], columns: Collection[str], part_size: int) -> list[Part]:
    """Cut the files into parts of about ``part_size`` bytes on disk each.

    Raises:
        JobError: Files that belong together have different columns or types of columns; a file is damaged.
    """
    _check_same_columns(files, columns)
    parts: list[Part] = []
    part: list[Piece] = []
    for piece in (piece for file in files for piece in _pieces(file, part_size)):
        if part and sum(other.size for other in part) + piece.size > part_size:
            parts.append(tuple(part))
            part = []
        part.append(piece)
    return [*parts, tuple(part)] if part else parts


def _expand(source: str) -> list[InputFile]:
    if "://" in source:
        raise JobError(f"raw data is read from files and folders, not from {source}; copy it to a path first")
    path = Path(source)
    if path.is_dir():
        paths = [found for found in sorted(path.rglob("*")) if _kind(found) and found.is_file()]
        if not paths:
            raise JobError(f"the folder {source} holds no .jsonl, .csv or .parquet files")
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(found) for found in sorted(glob.glob(source, recursive=True)) if Path(found).is_file()]  # noqa: PTH207
        if not paths:
            raise JobError(f"there is no file, folder or match for {source}")
    return [_input_file(found) for found in paths]


def _input_file(path: Path) -> InputFile:
    kind = _kind(path)
    if kind is None:
        raise JobError(f"{path} is of no kind that can be read; use .jsonl, .csv (each also as .gz) or .parquet")
    return InputFile(path, kind)


def _kind(path: Path) -> Kind | None:
    return None if path.name.startswith(".") else _KINDS.get(Path(path.name.removesuffix(".gz")).suffix)


def _pieces(file: InputFile, part_size: int) -> list[Piece]:
    if file.kind == "parquet":
        return _row_group_pieces(file, part_size)
    if file.kind == "csv" or file.compressed or file.size <= part_size:
        return [Piece(file, 0, file.size if file.kind == "jsonl" and not file.compressed else -1, file.size)]
    ends = [0]
    with file.path.open("rb") as stream:
        while ends[-1] < file.size:
            stream.seek(min(ends[-1] + part_size, file.size))
            stream.readline()
            ends.append(stream.tell())
    return [Piece(file, begin, end, end - begin) for begin, end in pairwise(ends)]


def _row_group_pieces(file: InputFile, part_size: int) -> list[Piece]:
    metadata = parquet.read_metadata(file.path)
    pieces: list[Piece] = []
    begin, size = 0, 0
    for group in range(metadata.num_row_groups):
        group_size = metadata.row_group(group).total_byte_size
        if size and size + group_size > part_size:
            pieces.append(Piece(file, begin, group, size))
            begin, size = group, 0
        size += group_size
    return [*pieces, Piece(file, begin, metadata.num_row_groups, size)]


def _read_json_lines(piece: Piece, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    with _open_binary(piece.file) as stream:
        stream.seek(piece.begin)
        position = piece.begin
        for number, line in enumerate(_lines(stream, piece), start=1):
            if 0 <= piece.end <= position:
                return
            position += len(line)
            if line.strip():
                yield number, _parse_json(piece, number, line)


def _lines(stream: gzip.GzipFile | io.BufferedReader, piece: Piece) -> Iterator[bytes]:
    try:
        yield from stream
    except (EOFError, gzip.BadGzipFile) as error:
        raise JobError(f"{piece.file.path} is not a whole gzip file: {error}") from error


def _parse_json(piece: Piece, number: int, line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 and piece.begin == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise JobError(f"{piece.place(number)}: not UTF-8 text (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        hint = "; this looks like one JSON array: write one object per line" if line.lstrip()[:1] == b"[" else ""
        raise JobError(f"{piece.place(number)}: invalid JSON at column {error.colno}: {error.msg}{hint}") from error
    if not isinstance(row, dict):
        raise JobError(
            f"{piece.place(number)}: a line must hold one JSON object with the columns, not a {_json_type(row)}"
        )
    return row


def _read_csv(piece: Piece, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    csv.field_size_limit(sys.maxsize)
    with _open_text(piece.file) as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, [])
            for fields in reader:
                if fields and len(fields) != len(header):
                    place = piece.place(reader.line_num)
                    raise JobError(f"{place}: {len(fields)} fields, but the header names {len(header)} columns")
                if fields:
                    yield reader.line_num, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise JobError(f"{piece.place(reader.line_num)}: invalid CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise JobError(f"{piece.file.path}:{_undecodable_line(piece.file)}: not UTF-8 text") from error
        except (EOFError, gzip.BadGzipFile) as error:
            raise JobError(f"{piece.file.path} is not a whole gzip file: {error}") from error


def _read_parquet(piece: Piece, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    number = 0
    try:
        with parquet.ParquetFile(piece.file.path) as content:
            groups = list(range(piece.begin, piece.end))
            for batch in content.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=sorted(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(f"{piece.file.path} is damaged after row {number} of this part: {_one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{piece.place(number + 1)} or one of the rows after it: not UTF-8 text") from error


def _check_same_columns(files: Sequence[InputFile], columns: Collection[str]) -> None:
    """Refuse files whose needed columns are missing or of another type than in the first file."""
    known: dict[str, str] = {}
    for file in files:
        types = _column_types(file)
        if types is None:
            continue
        for column in sorted(columns):
            if column not in types:
                place = f"{file.path}:1" if file.kind == "csv" else file.path
                raise JobError(f"{place}: no column {column!r}; the file has {', '.join(map(repr, types)) or 'none'}")
            if known.setdefault(column, types[column]) != types[column]:
                raise JobError(
                    f"{file.path}: column {column!r} is {types[column]}, but {known[column]} in {files[0].path}: "
                    "these files do not belong to one dataset"
                )


def _column_types(file: InputFile) -> dict[str, str] | None:
    """Type of each column by the file's header; None where the rows alone know (JSON lines, empty CSV files)."""
    if file.kind == "jsonl":
        return None
    if file.kind == "parquet":
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
        raise JobError(f"{file.path} is not a whole gzip file: {error}") from error
    if header is not None and len(set(header)) < len(header):
        raise JobError(f"{file.path}:1: a column is named twice: {', '.join(header)}")
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
