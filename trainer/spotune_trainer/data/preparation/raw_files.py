"""A file of raw rows, and a range of its rows: format, compression, and where it is read.

Formats are JSON lines (``.jsonl``, ``.ndjson``, ``.json``) and CSV with a header, both also compressed (``.gz``,
``.bz2``, ``.xz``, ``.zst``), Parquet, and Arrow IPC (``.arrow``, as file or stream). A file is local, or in a store:
then it is copied to this node while it is read.
"""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow
from pyarrow import parquet

from spotune.errors import JobError
from spotune_trainer.data.stores.failures import detail
from spotune_trainer.data.stores.find import local_copy
from spotune_trainer.data.stores.stored_file import StoredFile
from spotune_trainer.files import cache_directory

FileFormat = Literal["jsonl", "csv", "parquet", "arrow"]

NAMES = ".jsonl, .csv (each also as .gz, .bz2, .xz or .zst), .parquet or .arrow"
_FORMATS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def _open_zstd(path: Path) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _open_plain(path: Path) -> io.BufferedReader:
    return path.open("rb")


_COMPRESSIONS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    ".gz": ("gzip", gzip.open),
    ".bz2": ("bzip2", bz2.open),
    ".xz": ("xz", lzma.open),
    ".zst": ("Zstandard", _open_zstd),
}


@dataclass(frozen=True)
class InputFile:
    """A file of raw rows and its format.

    Attributes:
        path: The file on this node. Of a file in a store only the name counts, until `on_this_node` has copied it.
        format: Its format.
        stored: The file in the store; None for a local file.
    """

    path: Path
    format: FileFormat
    stored: StoredFile | None = None

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return str(self.path) if self.stored is None else self.stored.url

    @property
    def compressed(self) -> bool:
        """Whether the whole file is compressed. Parquet compresses within."""
        return self.path.suffix in _COMPRESSIONS

    @property
    def size(self) -> int:
        """Bytes on disk or in the store."""
        return self.path.stat().st_size if self.stored is None else self.stored.size

    @contextmanager
    def on_this_node(self) -> Iterator[InputFile]:
        """The file itself, or a copy that is deleted on exit.

        Raises:
            JobError: The file is missing in the store, or access is denied.
            InfrastructureError: It was replaced since it was found, or the download failed.
        """
        if self.stored is None:
            yield self
            return
        with local_copy(self.stored, cache_directory() / "raw-rows") as path:
            yield dataclasses.replace(self, path=path)

    def open(self) -> io.BufferedReader:
        """Its content as bytes, decompressed."""
        _, opener = _COMPRESSIONS.get(self.path.suffix, ("", _open_plain))
        return cast("io.BufferedReader", opener(self.path))

    def open_text(self) -> io.TextIOWrapper:
        """Its content as text, decompressed, with line ends as they are."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", newline="")

    @contextmanager
    def checking_compression(self) -> Iterator[None]:
        """Turn errors of the decompression into JobErrors."""
        try:
            yield
        except (EOFError, OSError, lzma.LZMAError, zlib.error, pyarrow.ArrowException) as error:
            if not self.compressed or getattr(error, "errno", None):  # then the disk failed
                raise
            kind, _ = _COMPRESSIONS[self.path.suffix]
            raise JobError(
                f"{self.name} is not a complete {kind} file: {detail(error)}; compress or copy it again"
            ) from error


@dataclass(frozen=True)
class FileRange:
    """Consecutive rows of one file, as the half-open range [start, stop).

    Attributes:
        file: The file.
        start: First byte (uncompressed JSON lines) or row group (Parquet); 0 for files that are not split.
        stop: Byte or row group after the last one; -1 for files that are not split.
        size: Bytes on disk or in the store, for progress.
    """

    file: InputFile
    start: int
    stop: int
    size: int

    def location(self, number: int) -> str:
        """A row's location for error messages: ``file:line``, or ``file, row n`` for Parquet and Arrow."""
        name = self.file.name
        if self.file.format in {"parquet", "arrow"}:
            return f"{name}, row {number + self._rows_before()}"
        return f"{name}:{number + self._lines_before()}"

    def _rows_before(self) -> int:
        if not self.start:
            return 0
        metadata = parquet.read_metadata(self.file.path)
        return sum(metadata.row_group(group).num_rows for group in range(self.start))

    def _lines_before(self) -> int:
        if not self.start:
            return 0
        with self.file.path.open("rb") as stream:
            lines, left = 0, self.start
            while left and (block := stream.read(min(left, 1 << 20))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def format_of(name: str) -> FileFormat | None:
    """The format of a file by its name; None for hidden files and unknown names."""
    if name.startswith("."):
        return None
    path = Path(name)
    if path.suffix not in _COMPRESSIONS:
        return _FORMATS.get(path.suffix)
    found = _FORMATS.get(Path(path.stem).suffix)
    return found if found in {"jsonl", "csv"} else None
