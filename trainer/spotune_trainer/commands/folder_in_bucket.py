"""The folders of a command on nodes that share only a bucket: checkpoints of its own, and what it leaves as the model.

    command/gen-0000007/node-0.json     the checkpoint folder at the start of generation 7, and what node 0 has changed
    command/gen-0000007/node-1.json     what node 1 has changed
    command/gen-0000007/node-1/000002   content of a file
    command/gen-0000007/output-1.json   what node 1 has left as a part of the model

A node replaces its index by one write. So files that appear together on the node, by the rename of their folder, also
appear together in the bucket. The first node of a generation decides what all of its nodes start from. What a
superseded generation writes later is never read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from spotune.errors import JobError
from spotune_trainer.bucket.checkpoints import newest_generation
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.checkpoint.memory.digests import checksum
from spotune_trainer.commands.environment import FIELD
from spotune_trainer.observability.repeating import repeating

logger = logging.getLogger("spotune.worker")

PUSH_SECONDS: Final = 5.0
_LAST_PUSH_ATTEMPTS: Final = 3
_POLL_SECONDS: Final = 0.5
_ROOT: Final = "command"


@dataclass(frozen=True)
class StoredFile:
    """A file as the bucket has it: name of the object, bytes, and XXH3-64 of its content in hex."""

    object: str
    size: int
    xxh3: str


@dataclass
class _Index:
    """What a node knows of the folder.

    Attributes:
        base: at the start of the generation; only of the first node.
        changed: what the node has written since.
        deleted: what it has deleted since.
    """

    base: dict[str, StoredFile] = field(default_factory=dict)
    changed: dict[str, StoredFile] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> _Index:
        """The inverse of `encode`."""
        value = json.loads(content)
        return cls(_stored(value["base"]), _stored(value["changed"]), value["deleted"])


class CheckpointFolder:
    """The folder in which a command keeps checkpoints of its own, on one node in one generation.

    Args:
        bucket: the bucket.
        folder: the folder on this node.
        generation: number of the generation.
        node: number of the node in its group.
        heartbeat: called while this node waits, and for each part of a file.
    """

    def __init__(self, bucket: Bucket, folder: Path, generation: int, node: int, heartbeat: Callable[[], None]) -> None:
        self._bucket = bucket
        self._folder = folder
        self._generation = generation
        self._node = node
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._base: dict[str, StoredFile] = {}
        self._files: dict[str, StoredFile] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._uploaded: set[str] = set()
        self._numbers = count()
        self._written: bytes | None = None

    def pull(self) -> None:
        """Make the folder what the last generation has left.

        Raises:
            BucketError: the bucket cannot be read.
            JobError: it has another file than was uploaded.
        """
        if self._node == 0:
            self._base = self._files = self._last_state()
            self._write_index()
            self._delete_older()
        else:
            self._base = self._files = self._base_of_first_node()
        for name in _versions(self._folder).keys() - self._base.keys():
            (self._folder / name).unlink()
        _download(self._bucket, self._base, self._folder, self._heartbeat)
        self._files = dict(self._base)
        self._versions = _versions(self._folder)

    @contextmanager
    def uploaded(self) -> Iterator[None]:
        """Upload what changes while the body runs, every few seconds, and at its end what is left."""
        with repeating(self._try_to_push, PUSH_SECONDS, "folder-upload"):
            try:
                yield
            finally:
                attempts = 1
                while not self._try_to_push() and attempts < _LAST_PUSH_ATTEMPTS:
                    attempts += 1

    def push(self) -> None:
        """Upload what has changed since the last call. A file that is being written is left for the next one.

        Raises:
            BucketError: the bucket does not accept it; a later call continues.
        """
        with self._lock:
            versions = _versions(self._folder)
            for name, version in versions.items():
                if self._versions.get(name) != version and (stored := self._upload(name, version)) is not None:
                    self._files[name], self._versions[name] = stored, version
            for name in self._files.keys() - versions.keys():
                del self._files[name]
                self._versions.pop(name, None)
            self._write_index()
            self._delete_unused()

    def _try_to_push(self) -> bool:
        try:
            self.push()
        except OSError as error:  # of the bucket, or of a local file
            logger.warning("the checkpoints of %s are not uploaded yet: %s", FIELD, error)
            return False
        return True

    def _upload(self, name: str, version: tuple[int, int]) -> StoredFile | None:
        """Upload a file; None if it changes meanwhile."""
        path, known = self._folder / name, self._files.get(name)
        try:
            with path.open("rb", buffering=0) as stream:
                digest = checksum(stream)
            if known is not None and (known.size, known.xxh3) == (version[1], digest):
                return known
            stored = StoredFile(f"{self._prefix}/{next(self._numbers):06d}", version[1], digest)
            self._uploaded.add(stored.object)
            self._bucket.upload(stored.object, path, lambda _: self._heartbeat())
        except FileNotFoundError:
            return None
        return stored if _version(path) == version else None

    def _write_index(self) -> None:
        changed = {name: stored for name, stored in self._files.items() if self._base.get(name) != stored}
        deleted = sorted(self._base.keys() - self._files.keys())
        content = _Index(self._base if self._node == 0 else {}, changed, deleted).encode()
        if content != self._written:
            self._bucket.write(f"{self._prefix}.json", content)
            self._written = content

    def _delete_unused(self) -> None:
        """Delete objects that this node's index does not name any more.

        A later generation may start from an index that was read before it was replaced. But it was claimed before that,
        so this finds the claim.
        """
        unused = self._uploaded - {stored.object for stored in self._files.values()}
        if unused and self._is_newest():
            self._bucket.delete(unused)
            self._uploaded -= unused

    def _is_newest(self) -> bool:
        return newest_generation(self._bucket, after=self._generation) == self._generation

    def _last_state(self) -> dict[str, StoredFile]:
        """The folder at the end of the last generation that has begun to run its command."""
        names = [name for name in self._bucket.list(_ROOT) if name.endswith(".json") and "/node-" in name]
        earlier = [name for name in names if name.endswith("/node-0.json") and name < _prefix(self._generation)]
        if not earlier:
            return {}
        of_last = [name for name in names if name.startswith(max(earlier).removesuffix("node-0.json"))]
        of_last.sort(key=lambda name: int(name.rpartition("-")[2].removesuffix(".json")), reverse=True)
        indices = [self._read_index(name) for name in of_last]
        state = dict(indices[-1].base)  # of node 0
        for index in indices:
            for name in index.deleted:
                state.pop(name, None)
        for index in indices:  # of files with the same name, that of the lowest node stays
            state |= index.changed
        return state

    def _base_of_first_node(self) -> dict[str, StoredFile]:
        content = _wait_for(self._bucket, f"{_prefix(self._generation)}/node-0.json", self._heartbeat)
        return _Index.decode(content).base

    def _delete_older(self) -> None:
        """Delete what earlier generations wrote, except for the files that this one starts from.

        A later generation that is claimed afterwards starts from the index of this one, which has been written.
        """
        if not self._is_newest():
            return
        used = {stored.object for stored in self._base.values()}
        names = [name for name in self._bucket.list(_ROOT) if name < _prefix(self._generation)]
        self._bucket.delete(name for name in names if name not in used)

    def _read_index(self, name: str) -> _Index:
        content = self._bucket.read(name)
        return _Index.decode(content) if content is not None else _Index()

    @property
    def _prefix(self) -> str:
        return f"{_prefix(self._generation)}/node-{self._node}"


def push_output(bucket: Bucket, output: Path, generation: int, node: int, heartbeat: Callable[[], None]) -> None:
    """Upload what the command of a node other than the first has left as a part of the model."""
    folder, files = f"{_prefix(generation)}/output-{node}", dict[str, StoredFile]()
    for name, version in _versions(output).items():
        with (output / name).open("rb", buffering=0) as stream:
            files[name] = StoredFile(f"{folder}/{len(files):06d}", version[1], checksum(stream))
        bucket.upload(files[name].object, output / name, lambda _: heartbeat())
    bucket.write(f"{folder}.json", _Index(changed=files).encode())


def pull_outputs(bucket: Bucket, output: Path, generation: int, nodes: int, heartbeat: Callable[[], None]) -> None:
    """On the first node: wait for what the other nodes have left as the model, and add it to that of this one.

    Of files with the same name, that of the lowest node stays.
    """
    found: dict[str, StoredFile] = {}
    for node in range(1, nodes):
        content = _wait_for(bucket, f"{_prefix(generation)}/output-{node}.json", heartbeat)
        found = _Index.decode(content).changed | found
    own = _versions(output)
    _download(bucket, {name: stored for name, stored in found.items() if name not in own}, output, heartbeat)


def _download(bucket: Bucket, files: Mapping[str, StoredFile], folder: Path, heartbeat: Callable[[], None]) -> None:
    """Have files in a folder, verified. Those that are there already are not downloaded."""
    for name, stored in files.items():
        path = folder / name
        if not _is_intact(path, stored):
            bucket.download(stored.object, path)
            if not _is_intact(path, stored):
                raise JobError(
                    f"{FIELD}: {bucket.url}/{stored.object} is damaged, which is {name} of SPOTUNE_CHECKPOINT_DIR or "
                    f"SPOTUNE_OUTPUT_DIR: delete {bucket.url}/{_ROOT}, and the command starts without its own files"
                )
        heartbeat()


def _wait_for(bucket: Bucket, name: str, heartbeat: Callable[[], None]) -> bytes:
    """The content of an object that another node of the group writes."""
    while (content := bucket.read(name)) is None:
        heartbeat()
        time.sleep(_POLL_SECONDS)
    return content


def _stored(value: Mapping[str, Any]) -> dict[str, StoredFile]:
    return {name: StoredFile(**each) for name, each in value.items()}


def _prefix(generation: int) -> str:
    return f"{_ROOT}/gen-{generation:07d}"


def _versions(folder: Path) -> dict[str, tuple[int, int]]:
    """Modification time in ns and bytes of all files in a folder, by their names. Links are followed."""
    paths = [Path(parent) / name for parent, _, found in os.walk(folder, followlinks=True) for name in found]
    versions = {str(path.relative_to(folder)): _version(path) for path in sorted(paths)}
    return {name: version for name, version in versions.items() if version is not None}


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _is_intact(path: Path, stored: StoredFile) -> bool:
    try:
        with path.open("rb", buffering=0) as stream:
            return path.stat().st_size == stored.size and checksum(stream) == stored.xxh3
    except FileNotFoundError:
        return False
