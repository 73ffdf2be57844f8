"""Reads rows and columns of raw files."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow
from pyarrow import ipc, parquet

from spotune.errors import JobError
from spotune_trainer.data.preparation.raw_files import FileRange, InputFile
from spotune_trainer.data.stores.failures import detail

RawRow = dict[str, Any]

_ROWS_PER_READ: Final = 1024
_ENCODE: Final = "; convert the file to UTF-8"
_CUT_SHORT: Final = "; the file ends within this line: if it was cut short, copy it again"
_ARROW_FILE: Final = b"ARROW1"
_ARROW_STOP: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_rows(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    """The rows with their number in this range, from 1. In text files it is the number of the line.

    Args:
        file_range: Where the rows are. A file in a store is on this node until the last row is read.
        columns: Columns that are needed. Of Parquet and Arrow files, only these are read.

    Raises:
        JobError: The file is damaged or malformed; the message names file and line. Or it is missing in its store.
        InfrastructureError: The store did not send the file.
    """
    readers = {"jsonl": _read_json_lines, "csv": _read_csv, "parquet": _read_parquet, "arrow": _read_arrow}
    with file_range.file.on_this_node() as file:
        if file.stored is not None:
            check_columns(file, column_types(file), columns)
        yield from readers[file.format](dataclasses.replace(file_range, file=file), columns)


def check_columns(file: InputFile, types: Collection[str] | None, columns: Collection[str]) -> None:
    """Raise JobError if the header of a file lacks a column.

    Args:
        file: The file.
        types: The columns that it has; None without a header.
        columns: Those that are needed.
    """
    if types is None:
        return
    for column in sorted(columns):
        if column not in types:
            place = f"{file.name}:1" if file.format == "csv" else file.name
            known = ", ".join(map(repr, types)) or "none"
            raise JobError(
                f"{place}: no column {column!r}; the file has {known}: correct the job's dataset or the file"
            )


def column_types(file: InputFile) -> dict[str, str] | None:
    """Type of each column from the file's header; None for files without one (JSON lines, empty CSV files).

    Raises:
        JobError: The file is damaged.
    """
    match file.format:
        case "jsonl":
            return None
        case "csv":
            return _csv_columns(file)
        case "parquet":
            try:
                return {field.name: str(field.type) for field in parquet.read_schema(file.path)}
            except (pyarrow.ArrowException, OSError) as error:
                raise JobError(
                    f"{file.name} is not a Parquet file, or damaged: {detail(error)}; copy it again"
                ) from error
    try:
        with _open_arrow(file) as content:
            return {field.name: str(field.type) for field in content.schema}
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(f"{file.name} is not an Arrow file, or damaged: {detail(error)}; copy it again") from error


def _csv_columns(file: InputFile) -> dict[str, str] | None:
    try:
        with file.checking_compression(), file.open_text() as stream:
            header = next(csv.reader(stream), None)
    except UnicodeDecodeError as error:
        raise JobError(f"{file.name}:{_undecodable_line(file)}: not UTF-8 text{_ENCODE}") from error
    if header is not None and len(set(header)) < len(header):
        raise JobError(f"{file.name}:1: two columns have the same name: {', '.join(header)}; rename one")
    return None if header is None else dict.fromkeys(header, "text")


def _read_json_lines(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    with file_range.file.checking_compression(), file_range.file.open() as stream:
        if file_range.start:
            stream.seek(file_range.start)
        position = file_range.start
        for number, line in enumerate(stream, start=1):
            if 0 <= file_range.stop <= position:
                return
            position += len(line)
            if line.strip():
                yield number, _parse_json(file_range, number, line)


def _parse_json(file_range: FileRange, number: int, line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 and file_range.start == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise JobError(
            f"{file_range.location(number)}: not UTF-8 text (byte {error.start + 1} of the line){_ENCODE}"
        ) from error
    except json.JSONDecodeError as error:
        hint = "; this looks like one JSON array: write one object per line" if line.lstrip()[:1] == b"[" else ""
        if not line.endswith(b"\n"):
            hint = hint or _CUT_SHORT
        hint = hint or "; correct or remove the line"
        raise JobError(
            f"{file_range.location(number)}: invalid JSON at column {error.colno}: {error.msg}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise JobError(
            f"{file_range.location(number)}: JSON that cannot be read: {error}; correct or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise JobError(
            f"{file_range.location(number)}: a line must hold one JSON object with the columns, not a "
            f"{_json_type(row)}: correct or remove the line"
        )
    return row


def _read_csv(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    del columns  # a line is parsed as a whole
    csv.field_size_limit(sys.maxsize)
    file = file_range.file
    with file.checking_compression(), file.open_text() as stream:
        lines = _Lines(stream)
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            for fields in reader:
                if fields and len(fields) != len(header):
                    count = f"{len(fields)} field{'s' * (len(fields) > 1)}"
                    raise JobError(
                        f"{file_range.location(reader.line_num)}: {count}, but the header names {len(header)} columns: "
                        f"correct the row, and quote text that has commas{lines.cut_short}"
                    )
                if fields:
                    yield reader.line_num, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise JobError(
                f"{file_range.location(reader.line_num)}: invalid CSV: {error}: correct the quotes{lines.cut_short}"
            ) from error
        except UnicodeDecodeError as error:
            raise JobError(f"{file.name}:{_undecodable_line(file)}: not UTF-8 text{_ENCODE}") from error


class _Lines:
    """The lines of a text file; it knows whether the last one ends with a line break."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._stream = stream
        self._last = ""

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self._last = line
            yield line

    @property
    def cut_short(self) -> str:
        """A hint if the file ends within the line that was read last; empty otherwise."""
        return "" if self._last.endswith(("\n", "\r")) else _CUT_SHORT


def _read_parquet(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    number = 0
    try:
        with parquet.ParquetFile(file_range.file.path) as content:
            stop = content.num_row_groups if file_range.stop < 0 else file_range.stop
            groups = list(range(file_range.start, stop))
            for batch in content.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=sorted(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(
            f"{file_range.file.name} is damaged after row {number} of this part: {detail(error)}; copy it again"
        ) from error
    except UnicodeDecodeError as error:
        raise JobError(
            f"{file_range.location(number + 1)} or one of the rows after it: not UTF-8 text{_ENCODE}"
        ) from error


def _read_arrow(file_range: FileRange, columns: Collection[str]) -> Iterator[tuple[int, RawRow]]:
    number = 0
    try:
        with _open_arrow(file_range.file) as content:
            for batch in _arrow_batches(content):
                selected = batch.select(sorted(columns))
                selected.validate(full=True)  # a wrong offset would read other memory, or end the process
                for start in range(0, selected.num_rows, _ROWS_PER_READ):
                    for row in selected.slice(start, _ROWS_PER_READ).to_pylist():
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(
            f"{file_range.file.name} is damaged after row {number}: {detail(error)}; copy it again"
        ) from error
    except UnicodeDecodeError as error:
        place = file_range.location(number + 1)
        raise JobError(f"{place} or one of the rows after it: not UTF-8 text{_ENCODE}") from error


@contextmanager
def _open_arrow(file: InputFile) -> Iterator[Any]:
    """A reader of the file's record batches; the file format starts with a magic string, the stream format does not."""
    with pyarrow.memory_map(str(file.path)) as content:
        if content.read(len(_ARROW_FILE)) == _ARROW_FILE:
            yield ipc.open_file(content)
            return
        content.seek(max(0, content.size() - len(_ARROW_STOP)))
        if content.read() != _ARROW_STOP:
            raise JobError(f"{file.name} is not a complete Arrow file or stream: write or copy it again")
        content.seek(0)
        yield ipc.open_stream(content)


def _arrow_batches(content: Any) -> Iterator[Any]:
    if isinstance(content, ipc.RecordBatchFileReader):
        return map(content.get_batch, range(content.num_record_batches))
    return iter(content)


def _undecodable_line(file: InputFile) -> int:
    with file.open() as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(value), "value")
