"""Random access to the samples of an MDS dataset, with shards prefetched in the background.

The shards are MosaicML streaming's, its ``StreamingDataset`` is not used: that class decides the sample order and the
partitioning over ranks itself, and keeps shared memory that outlives killed processes. Here ``schedule`` decides which
samples come next, so this module only has to open the shards that hold them.
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
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from streaming.base.format.mds import MDSReader
from streaming.base.format.mds.encodings import is_mds_encoding

from spotune.errors import DataError, JobError
from spotune_trainer.data.cache import FileSource, ShardCache, find_damage
from spotune_trainer.data.manifests import INDEX
from spotune_trainer.data.stores.failures import is_for_the_user
from spotune_trainer.files import is_inner_path

MAX_OPEN_SHARDS = 64
"""Shards that are memory-mapped at once; a shuffle block spans about five."""
MAX_PREFETCHED_SHARDS = 16
"""Shards that are fetched, or being fetched, and not read yet."""
_PREFETCH_THREADS = 2
_MAX_SHARD_BYTES = 1 << 32
"""Offsets in a shard have 32 bits."""
_UINT32 = 4
"""Bytes of an offset."""


class ShardedDataset:
    """Random access to the samples of an MDS dataset by sample id.

    Sample ids count from 0 through the shards, in the order of the index. A local folder is read in place; remote and
    compressed shards go through the cache. Several processes of a node may share ``cache_directory``, and each may be
    killed at any time. Thread-safe.

    Args:
        source: A folder with an ``index.json``, or the ``s3://``, ``gs://``, ``az://`` or ``hf://`` URL of one.
        cache_directory: Folder for downloaded shards; they are reused after a restart.
        max_open_shards: How many are memory-mapped at once.
        max_prefetched_shards: How many are fetched, or being fetched, and not read yet.

    Attributes:
        index_hash: SHA-256 of ``index.json``, in hex. The index holds a hash of each shard, so this identifies the
            dataset's content.
        shard_sizes: Samples per shard.
        columns: MDS encoding of each column, by name.

    Raises:
        JobError: The source is not an MDS dataset, or access is denied.
        InfrastructureError: The index could not be downloaded.
    """

    def __init__(
        self,
        source: str,
        cache_directory: Path | str,
        *,
        max_open_shards: int = MAX_OPEN_SHARDS,
        max_prefetched_shards: int = MAX_PREFETCHED_SHARDS,
    ) -> None:
        self.source = source
        self._max_open_shards = max_open_shards
        self._max_prefetched_shards = max_prefetched_shards
        self._files = FileSource(source)
        index = _read_index(self._files, Path(cache_directory))
        self.index_hash = hashlib.sha256(index).hexdigest()
        self._readers = _parse_index(source, index)
        self.shard_sizes = [reader.samples for reader in self._readers]
        self.columns = dict(zip(self._readers[0].column_names, self._readers[0].column_encodings, strict=True))
        self._shard_stops = list(accumulate(self.shard_sizes))
        key = hashlib.sha256(f"{source}\n{self.index_hash}".encode()).hexdigest()[:16]
        self._cache = ShardCache(self._files, Path(cache_directory) / key)
        self._lock = threading.Lock()
        self._open_shards: OrderedDict[int, _OpenShard] = OrderedDict()
        self._prefetched: dict[int, Future[_OpenShard]] = {}
        self._prefetch_pool: ThreadPoolExecutor | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return self._shard_stops[-1]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        """One sample as a mapping from column to value.

        Raises:
            IndexError: The id is out of range.
            DataError: Its shard is missing or damaged. The message names the shard.
            InfrastructureError: Its shard could not be downloaded.
        """
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of {self.num_samples} in {self.source}")
        shard = bisect_right(self._shard_stops, sample_id)
        return self._get_shard(shard)[sample_id - self._shard_stops[shard] + self.shard_sizes[shard]]

    def prefetch(self, sample_ids: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Start fetching the shards of these samples in the background, in the order of the samples.

        Returns:
            True if all of their shards are open, fetched or being fetched. False if the limit on prefetched shards was
            reached: call again later with the same samples.
        """
        shards = np.searchsorted(self._shard_stops, np.asarray(sample_ids), side="right").tolist()
        with self._lock:
            for shard in dict.fromkeys(shards):
                if shard in self._open_shards or shard in self._prefetched:
                    continue
                if len(self._prefetched) >= self._max_prefetched_shards:
                    return False
                if self._prefetch_pool is None:
                    self._prefetch_pool = ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix="shard-prefetch")
                self._prefetched[shard] = self._prefetch_pool.submit(self._open_shard, shard)
        return True

    def close(self, *, wait: bool = True) -> None:
        """Stop fetching; wait for what is being fetched unless `wait` is false. Files in the cache stay."""
        self._files.close()
        if self._prefetch_pool is not None:
            self._prefetch_pool.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> ShardedDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _get_shard(self, shard: int) -> _OpenShard:
        """The open shard, from the least-recently-used list, a finished prefetch, or the cache."""
        with self._lock:
            opened = self._open_shards.get(shard)
            if opened is not None:
                self._open_shards.move_to_end(shard)
                return opened
            prefetched = self._prefetched.pop(shard, None)
        opened = self._open_shard(shard) if prefetched is None else prefetched.result()
        with self._lock:
            self._open_shards[shard] = opened
            while len(self._open_shards) > self._max_open_shards:
                self._open_shards.popitem(last=False)
        return opened

    def _open_shard(self, shard: int) -> _OpenShard:
        """Fetch and check a shard; a damaged copy in the cache is downloaded once more."""
        reader = self._readers[shard]
        path = self._cache.fetch(reader.raw_data, reader.zip_data, reader.compression)
        opened = _OpenShard(path, reader)
        if opened.damage and self._cache.discard(reader.raw_data):
            path = self._cache.fetch(reader.raw_data, reader.zip_data, reader.compression)
            opened = _OpenShard(path, reader)
        if opened.damage:
            raise DataError(
                f"the shard {path} is damaged: {opened.damage}. Copy it again, or write the dataset again "
                "with `spotune shard`."
            )
        return opened


class _OpenShard:
    """A memory-mapped shard whose content was checked against the index.

    Attributes:
        damage: How the content differs from the index; empty if it is intact.
    """

    def __init__(self, path: Path, reader: MDSReader) -> None:
        self._path = path
        self._reader = reader
        with path.open("rb") as stream:
            size = path.stat().st_size
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        with memoryview(self._data) as content:
            self.damage = find_damage(content, reader.raw_data)
        # An MDS shard starts with the number of samples n (uint32), then n + 1 byte offsets (uint32).
        self._offsets = [] if self.damage else np.frombuffer(self._data, np.uint32, reader.samples + 1, 4).tolist()

    def __getitem__(self, position: int) -> dict[str, Any]:
        try:
            sample = self._data[self._offsets[position] : self._offsets[position + 1]]
            decoded: dict[str, Any] = self._reader.decode_sample(sample)
        except Exception as error:  # the decoders of many libraries raise whatever they like
            raise DataError(
                f"sample {position} of the shard {self._path} cannot be decoded ({type(error).__name__}: {error}). "
                "Write the dataset again with `spotune shard`."
            ) from error
        return decoded


def read_stored_file(source: str, name: str, cache_directory: Path) -> bytes | None:
    """The content of a file in a store; None if there is none, or if it may not be read.

    Args:
        source: URL of its folder.
        name: Of the file.
        cache_directory: Folder for the download.

    Raises:
        InfrastructureError: It could not be downloaded.
    """
    files = FileSource(source)

    def attempt() -> bytes | None:
        try:
            return _download(files, name, cache_directory)
        except Exception as error:
            if is_for_the_user(error):
                return None
            raise

    return files.retry(name, attempt)


def _read_index(files: FileSource, cache_directory: Path) -> bytes:
    """The current content of the index. It is never cached, so a rewritten dataset is detected."""
    if files.folder is not None:
        path = files.folder / INDEX
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            hint = "write it with `spotune shard`" if files.folder.exists() else "there is no such folder"
            raise JobError(f"{files.folder} is not a dataset of MDS shards: no {INDEX}; {hint}") from None
    return files.retry(INDEX, partial(_download, files, INDEX, cache_directory))


def _download(files: FileSource, name: str, cache_directory: Path) -> bytes:
    cache_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory, prefix=".index-") as temporary:
        target = Path(temporary) / name
        files.download(name, target)
        return target.read_bytes()


def _parse_index(source: str, index: bytes) -> list[MDSReader]:
    place = f"the {INDEX} of {source}"
    try:
        content = json.loads(index)
        shards = [shard for shard in content["shards"] if shard["samples"] > 0]
        foreign = {str(shard["format"]) for shard in shards} - {"mds"}
        if content["version"] != 2 or foreign:
            raise JobError(f"{place} is not in MDS version 2 (found {', '.join(foreign) or content['version']})")
        readers = [MDSReader.from_json("", "", shard) for shard in shards]
        for reader in readers:
            _check_reader(reader)
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise JobError(f"{place} cannot be read: {error}. Write the dataset again with `spotune shard`.") from error
    if not readers:
        raise JobError(f"{source} has no samples")
    _check_columns(place, readers)
    return readers


def _check_reader(reader: MDSReader) -> None:
    """Check the entry of a shard. The index may be anybody's, and streaming checks next to nothing of it.

    Raises:
        ValueError, TypeError, AttributeError: the entry is invalid.
    """
    # Streaming's types promise what nothing has checked.
    names: Sequence[Any] = reader.column_names
    encodings: Sequence[Any] = reader.column_encodings
    sizes: Sequence[Any] = reader.column_sizes
    num_samples: Any = reader.samples
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError(f"{len(names)} columns have {len(encodings)} encodings and {len(sizes)} sizes")
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if not (isinstance(name, str) and isinstance(encoding, str) and is_mds_encoding(encoding)):
            raise ValueError(f"the column {name!r:.50} has the unknown encoding {encoding!r:.50}")
        if size is not None and not (isinstance(size, int) and 0 <= size < _MAX_SHARD_BYTES):
            raise ValueError(f"the column {name!r:.50} has the size {size!r:.50}")
    reader.validate(allow_unsafe_types=False)
    for file in filter(None, (reader.raw_data, reader.zip_data)):
        # Without this, a downloaded shard could replace any file that the trainer may write to.
        if not is_inner_path(file.basename):
            raise ValueError(f"{file.basename!r:.100} is not the name of a file in the folder of the index")
        num_bytes: Any = file.bytes
        hashes: Any = file.hashes
        if not isinstance(num_bytes, int) or not isinstance(hashes, dict):
            raise TypeError(f"{file.basename!r:.100} has no size or no hashes")
    if not isinstance(num_samples, int) or _UINT32 * (num_samples + 2) > reader.raw_data.bytes:
        raise ValueError(f"{reader.raw_data.basename} cannot hold {num_samples!r:.50} samples in its size")


def _check_columns(place: str, readers: Iterable[MDSReader]) -> None:
    first, *others = readers
    for reader in others:
        if (reader.column_names, reader.column_encodings) != (first.column_names, first.column_encodings):
            raise JobError(
                f"{place} mixes shards of different columns: {first.raw_data.basename} has "
                f"{', '.join(first.column_names)}; {reader.raw_data.basename} has {', '.join(reader.column_names)}"
            )
