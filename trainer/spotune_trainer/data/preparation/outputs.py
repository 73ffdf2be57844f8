"""Where a dataset is written: a folder on this machine, or one in a store."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.counts.split_counts import PartSummary
from spotune_trainer.data.manifests import INDEX, MANIFEST
from spotune_trainer.data.preparation.assemble import assemble_dataset, shard_name
from spotune_trainer.data.preparation.inputs import part_name
from spotune_trainer.data.preparation.parts import SPLITS, SUMMARY
from spotune_trainer.data.stores.stored_folder import StoredFolder
from spotune_trainer.files import cache_directory, content_key, fsync_directory

_STATE: Final = ".preparing"
"""Folder in the store for what a killed preparation needs: one small file for each part that was uploaded."""
_BEGUN: Final = "begun"
_SHARD: Final = re.compile(rf"(?:(?:{'|'.join(SPLITS)})/)?shard\.\d{{5,}}\.mds")
_TRANSFERS: Final = 8  # small files at once


class Output(Protocol):
    """The place of one dataset.

    Attributes:
        place: Path or URL.
        staging: Folder on this machine for parts that are not finished.
        ahead: For each process, how many parts may be in `staging`; None for all.
    """

    place: str
    staging: Path
    ahead: int | None

    def find_manifest(self) -> dict[str, Any] | None:
        """The manifest of the dataset that is there; None if nothing, or an unfinished one, is there.

        Raises:
            JobError: Something else is there.
        """
        ...

    def begin(self, key: str) -> None:
        """Delete what was staged with another key; put the summaries of parts that need not be written into staging."""
        ...

    def keep_part(self, number: int, summary: PartSummary) -> None:
        """Called with each part that is staged, in order."""
        ...

    def finish(self, summaries: Sequence[PartSummary], manifest: Mapping[str, Any]) -> None:
        """Publish the dataset. May be killed at any time and run again."""
        ...

    def forget(self) -> None:
        """Delete what is needed to go on with this dataset, which is finished."""
        ...


def open_output(place: Path | str, folders: Mapping[str, str]) -> Output:
    """The output at a path or URL.

    Args:
        place: Where the dataset is written to.
        folders: Folder of each split, relative to it.

    Raises:
        JobError: Nothing can be written to such a URL.
    """
    if "://" in str(place):
        return StoredOutput(StoredFolder(str(place)), folders)
    return LocalOutput(Path(place), folders)


@contextmanager
def exclusive_staging(output: Output) -> Iterator[None]:
    """Hold the lock of the staging folder, and delete the folder afterwards unless the next run can go on with it.

    The kernel releases the lock when this process exits or is killed.

    Raises:
        InfrastructureError: Another process holds the lock, or the disk failed. What is staged is kept then.
    """
    output.staging.mkdir(parents=True, exist_ok=True)
    with (output.staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another process is preparing {output.place}; wait until it has finished"
            raise InfrastructureError(problem) from None
        try:
            yield
            output.forget()
        except JobError:
            shutil.rmtree(output.staging)
            raise
        except OSError as error:
            raise InfrastructureError(
                f"{output.place} could not be prepared: {error}; run it again to continue"
            ) from error
        shutil.rmtree(output.staging)


class LocalOutput:
    """A folder on this machine. It appears at once, when it is complete.

    Args:
        folder: The folder.
        folders: Folder of each split, relative to it.
    """

    def __init__(self, folder: Path, folders: Mapping[str, str]) -> None:
        self.place = str(folder)
        self.staging = folder.with_name(f".{folder.name}.preparing")
        self.ahead: int | None = None
        self._folder = folder
        self._folders = folders
        self._staged = self.staging

    def find_manifest(self) -> dict[str, Any] | None:
        """See `Output`."""
        if not self._folder.exists() or (self._folder.is_dir() and not any(self._folder.iterdir())):
            return None
        path = self._folder / MANIFEST
        return _parse(path.read_bytes() if path.is_file() else b"null", self.place)

    def begin(self, key: str) -> None:
        """See `Output`."""
        self._staged = self.staging / key
        for path in self.staging.iterdir():
            if path.is_dir() and path != self._staged:
                shutil.rmtree(path)

    def keep_part(self, number: int, summary: PartSummary) -> None:
        """Nothing to do: the part stays in staging until all are complete."""

    def finish(self, summaries: Sequence[PartSummary], manifest: Mapping[str, Any]) -> None:
        """See `Output`."""
        final = assemble_dataset(self._staged, summaries, self._folders, manifest)
        if self._folder.exists() and any(self._folder.iterdir()):
            self._folder.rename(self._staged / "replaced")
        final.rename(self._folder)
        fsync_directory(self._folder.parent)

    def forget(self) -> None:
        """Nothing to do: the staging folder is all there is."""


class StoredOutput:
    """A folder in a store. Each part is uploaded when it is complete, and deleted on this machine.

    The index, without which nobody reads the shards, and the manifest are uploaded last. Until then ``.preparing/KEY``
    in the folder has the summary of each part that was uploaded, so that any machine can go on.

    Args:
        folder: The folder.
        folders: Folder of each split, relative to it.
    """

    def __init__(self, folder: StoredFolder, folders: Mapping[str, str]) -> None:
        self.place = folder.url
        self.staging = cache_directory() / "preparing" / content_key(folder.url)
        self.ahead: int | None = 2  # one that is written, one that waits for its upload
        self._folder = folder
        self._folders = folders
        self._staged = self.staging
        self._state = _STATE
        self._uploaded = frozenset[str]()
        self._shards = Counter[str]()

    def find_manifest(self) -> dict[str, Any] | None:
        """See `Output`."""
        content = self._folder.read(MANIFEST)
        if content is None and (self._folder.list_files(f"{_STATE}/") or not self._folder.list_files()):
            return None
        return _parse(content or b"null", self.place)

    def begin(self, key: str) -> None:
        """See `Output`. Index and manifest of a dataset that is replaced are deleted, before any of its shards is."""
        self._staged, self._state = self.staging / key, f"{_STATE}/{key}"
        shutil.rmtree(self._staged, ignore_errors=True)  # parts that were not uploaded are written again
        state = self._folder.list_files(f"{_STATE}/")
        mine = {PurePosixPath(name).stem: file for name, file in state.items() if name.startswith(f"{self._state}/")}
        self._delete(name for name in state if not name.startswith(f"{self._state}/"))
        self._folder.write(f"{self._state}/{_BEGUN}", b"")
        self._delete(_path(folder, INDEX) for folder in ("", *SPLITS))
        self._folder.delete(MANIFEST)
        mine.pop(_BEGUN, None)
        self._uploaded = frozenset(mine)

        def restore(part: str) -> None:
            folder = self._staged / part
            folder.mkdir(parents=True)
            self._folder.copy(mine[part], folder / SUMMARY)

        _at_once(restore, mine)

    def keep_part(self, number: int, summary: PartSummary) -> None:
        """See `Output`."""
        part = part_name(number)
        staged, uploaded = self._staged / part, part in self._uploaded
        for split, folder in self._folders.items():
            for shard in summary.splits[split].shards:
                name = _path(folder, shard_name(self._shards[split]))
                self._shards[split] += 1
                if not uploaded:
                    self._folder.write(name, (staged / split / shard["raw_data"]["basename"]).read_bytes())
        if not uploaded:
            self._folder.write(self._state_of(part), (staged / SUMMARY).read_bytes())
        shutil.rmtree(staged)

    def finish(self, summaries: Sequence[PartSummary], manifest: Mapping[str, Any]) -> None:
        """See `Output`.

        Raises:
            InfrastructureError: Shards are missing, because something else has written to the folder.
        """
        stale = self._check_shards(summaries)
        final = assemble_dataset(self._staged, summaries, self._folders, manifest)
        for folder in self._folders.values():
            name = _path(folder, INDEX)
            self._folder.write(name, (final / name).read_bytes())
        self._folder.write(MANIFEST, (final / MANIFEST).read_bytes())
        self._delete(stale)

    def forget(self) -> None:
        """See `Output`."""
        self._delete(self._folder.list_files(f"{_STATE}/"))

    def _check_shards(self, summaries: Sequence[PartSummary]) -> list[str]:
        """Check that all shards are there. Returns the names of those of a dataset that was here before."""
        found = {name: file.size for name, file in self._folder.list_files().items() if _SHARD.fullmatch(name)}
        missing = set()
        for split, folder in self._folders.items():
            number = 0
            for part, summary in enumerate(summaries):
                for shard in summary.splits[split].shards:
                    if found.pop(_path(folder, shard_name(number)), None) != shard["raw_data"]["bytes"]:
                        missing.add(part_name(part))
                    number += 1
        if missing:
            self._delete(map(self._state_of, missing))
            raise InfrastructureError(
                f"shards of {len(missing)} parts in {self.place} were deleted or replaced while the dataset was "
                "written: let nothing else write there, and run it again; it writes these parts again"
            )
        return list(found)

    def _state_of(self, part: str) -> str:
        return f"{self._state}/{part}.json"

    def _delete(self, names: Iterable[str]) -> None:
        _at_once(self._folder.delete, names)


def _path(folder: str, name: str) -> str:
    return str(PurePosixPath(folder, name))


def _at_once(transfer: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        for _ in pool.map(transfer, names):
            pass


def _parse(content: bytes, place: str) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise JobError(f"{place}/{MANIFEST} is not valid JSON ({error}); it was damaged or edited by hand") from error
    if not isinstance(manifest, dict) or "key" not in manifest:
        raise JobError(f"{place} exists and was not written by `spotune shard`; choose a folder that does not exist")
    return manifest
