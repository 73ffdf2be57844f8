"""A dataset of MDS shards, read by sample id.

MosaicML's ``StreamingDataset`` keeps its own order, its own idea of the world and shared memory that outlives killed
processes. None of it is needed when the schedule says which samples come next: this class opens the shards that those
samples lie in, and fetches the ones after them ahead of time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from streaming.base.format.mds import MDSReader

from spotune.errors import DataError, JobError
from spotune_trainer.data.cache import FileSource, ShardCache, damage

INDEX = "index.json"

_SHARDS_OPEN = 64  # memory-mapped at a time; a shuffle block spans about five
_SHARDS_AHEAD = 16  # fetched before they are needed
_FETCHERS = 2


class ShardedDataset:
    """Random access to the samples of a dataset of MDS shards.

    Processes of one node may share ``cache_directory``; each of them may be killed at any moment. A folder is read in
    place and needs no cache, unless its shards are compressed. Safe to use from several threads.

    Args:
        source: A folder with an ``index.json``, or an ``s3://``, ``gs://``, ``az://`` or ``hf://`` URL of one.
        cache_directory: Where downloaded shards are kept, over restarts.

    Attributes:
        index_hash: SHA-256 of ``index.json``, in hex; it covers the shards' own hashes.
        shard_sizes: Samples per shard.
        columns: Encoding of each column.

    Raises:
        JobError: The source is no dataset of MDS shards, or may not be read.
        InfrastructureError: The index could not be downloaded.
    """

    def __init__(self, source: str, cache_directory: Path | str) -> None:
        self.source = source
        self._files = FileSource(source)
        index = _read_index(self._files, Path(cache_directory))
        self.index_hash = hashlib.sha256(index).hexdigest()
        self._readers = _parse_index(source, index)
        self.shard_sizes = [reader.samples for reader in self._readers]
        self.columns = dict(zip(self._readers[0].column_names, self._readers[0].column_encodings, strict=True))
        self._shard_ends = list(accumulate(self.shard_sizes))
        key = hashlib.sha256(f"{source}\n{self.index_hash}".encode()).hexdigest()[:16]
        self._cache = ShardCache(self._files, Path(cache_directory) / key)
        self._guard = threading.Lock()
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._ahead: dict[int, Future[_OpenShard]] = {}
        self._fetchers: ThreadPoolExecutor | None = None

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return self._shard_ends[-1]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        """The columns of one sample.

        Raises:
            IndexError: There is no such sample.
            DataError: Its shard is missing or damaged; the message names the shard.
            InfrastructureError: Its shard could not be downloaded.
        """
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of {self.num_samples} in {self.source}")
        shard = bisect_right(self._shard_ends, sample_id)
        return self._shard(shard)[sample_id - self._shard_ends[shard] + self.shard_sizes[shard]]

    def prefetch(self, sample_ids: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Fetch the shards of these samples in the background, in this order.

        Returns:
            Whether all of them are here or on their way; False when as many shards wait to be used as may be fetched
            ahead, and the call is to be repeated later.
        """
        shards = np.searchsorted(self._shard_ends, np.asarray(sample_ids), side="right").tolist()
        with self._guard:
            for shard in dict.fromkeys(shards):
                if shard in self._open or shard in self._ahead:
                    continue
                if len(self._ahead) >= _SHARDS_AHEAD:
                    return False
                if self._fetchers is None:
                    self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="shard-prefetch")
                self._ahead[shard] = self._fetchers.submit(self._open_shard, shard)
        return True

    def close(self) -> None:
        """Stop fetching. What is on disk stays."""
        self._files.close()
        if self._fetchers is not None:
            self._fetchers.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ShardedDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _shard(self, shard: int) -> _OpenShard:
        with self._guard:
            opened = self._open.get(shard)
            if opened is not None:
                self._open.move_to_end(shard)
                return opened
            ahead = self._ahead.pop(shard, None)
        opened = self._open_shard(shard) if ahead is None else ahead.result()
        with self._guard:
            self._open[shard] = opened
            while len(self._open) > _SHARDS_OPEN:
                self._open.popitem(last=False)
        return opened

    def _open_shard(self, shard: int) -> _OpenShard:
        reader = self._readers[shard]
        path = self._cache.local(reader.raw_data, reader.zip_data, reader.compression)
        opened = _OpenShard(path, reader)
        if opened.damage and self._cache.discard(reader.raw_data):
            path = self._cache.local(reader.raw_data, reader.zip_data, reader.compression)
            opened = _OpenShard(path, reader)
        if opened.damage:
            raise DataError(
                f"the shard {path} is damaged: {opened.damage}. Copy it again, or write the dataset again "
                "with `spotune shard`."
            )
        return opened


class _OpenShard:
    """One shard, mapped into memory and checked against the index."""

    def __init__(self, path: Path, reader: MDSReader) -> None:
        self._reader = reader
        with path.open("rb") as stream:
            size = path.stat().st_size
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        with memoryview(self._data) as content:
            self.damage = damage(content, reader.raw_data)
        # An MDS shard begins with the number of samples and their offsets, the end of the last one included.
        self._offsets = [] if self.damage else np.frombuffer(self._data, np.uint32, reader.samples + 1, 4).tolist()

    def __getitem__(self, position: int) -> dict[str, Any]:
        sample = self._data[self._offsets[position] : self._offsets[position + 1]]
        decoded: dict[str, Any] = self._reader.decode_sample(sample)
        return decoded


def _read_index(files: FileSource, cache_directory: Path) -> bytes:
    """The index as it is now: a dataset that was written again is noticed, and never mixed with cached shards."""
    if files.folder is not None:
        path = files.folder / INDEX
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            hint = "write it with `spotune shard`" if files.folder.exists() else "there is no such folder"
            raise JobError(f"{files.folder} is no dataset of MDS shards: no {INDEX}; {hint}") from None
    cache_directory.mkdir(parents=True, exist_ok=True)

    def attempt() -> bytes:
        with tempfile.TemporaryDirectory(dir=cache_directory, prefix=".index-") as temporary:
            target = Path(temporary) / INDEX
            files.download(INDEX, target)
            return target.read_bytes()

    return files.retry(INDEX, attempt)


def _parse_index(source: str, index: bytes) -> list[MDSReader]:
    place = f"the {INDEX} of {source}"
    try:
        content = json.loads(index)
        shards = [shard for shard in content["shards"] if shard["samples"] > 0]
        foreign = {shard["format"] for shard in shards} - {"mds"}
        if content["version"] != 2 or foreign:
            raise JobError(f"{place} is not of MDS version 2 (found {', '.join(foreign) or content['version']})")
        readers = [MDSReader.from_json("", "", shard) for shard in shards]
        for reader in readers:
            reader.validate(allow_unsafe_types=False)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{place} cannot be read: {error}. Write the dataset again with `spotune shard`.") from error
    if not readers:
        raise JobError(f"{source} has no samples")
    _check_columns(place, readers)
    return readers


def _check_columns(place: str, readers: Iterable[MDSReader]) -> None:
    first, *others = readers
    for reader in others:
        if (reader.column_names, reader.column_encodings) != (first.column_names, first.column_encodings):
            raise JobError(
                f"{place} mixes shards of different columns: {first.raw_data.basename} has "
                f"{', '.join(first.column_names)}; {reader.raw_data.basename} has {', '.join(reader.column_names)}"
            )
