"""A cache of folders that are made once per content: `<kind>-<key>`, each complete or absent."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS_KEPT = 3600.0


def key_of(*parts: str | int | tuple[str, ...]) -> str:
    """A short hash of this content."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Store:
    """The cache. If several processes request the same entry, one makes it and the others wait."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def get(self, kind: str, key: str, make: Callable[[Path], None]) -> Path:
        """Return the folder of this content; make it if it is missing.

        Args:
            kind: Lower-case letters.
            key: Changes when the content changes.
            make: Fills the empty folder that it gets; may request entries of other kinds.
        """
        entry = self.root / f"{kind}-{key}"
        with self._locked(kind):
            if not entry.exists():
                self._remove_unfinished(kind)
                unfinished = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=self.root))
                unfinished.chmod(0o755)
                make(unfinished)
                unfinished.rename(entry)
            os.utime(entry)
        return entry

    def prune(self, kind: str, keep: Collection[Path], unused_seconds: float = SECONDS_KEPT) -> list[Path]:
        """Remove entries that are not needed any more; returns the removed ones.

        An entry is kept if it is the most recently used of its kind, was requested in the last `unused_seconds`,
        contains one of the paths `keep`, or is mounted in any mount namespace of this machine.
        """
        with self._locked(kind):
            self._remove_unfinished(kind)
            entries = sorted(self.root.glob(f"{kind}-*"), key=lambda entry: entry.stat().st_mtime)
            mounted = _mounted_names()
            asked_for_after = time.time() - unused_seconds
            removed = [
                entry
                for entry in entries[:-1]
                if entry.stat().st_mtime < asked_for_after
                and entry.name not in mounted
                and not any(path.is_relative_to(entry) for path in keep)
            ]
            for entry in removed:
                entry.rename(entry.with_name(f".{entry.name}"))
            self._remove_unfinished(kind)
        return removed

    @contextmanager
    def _locked(self, kind: str) -> Iterator[None]:
        with (self.root / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_unfinished(self, kind: str) -> None:
        """Remove unfinished folders of killed processes. No other process makes this kind: this one has the lock."""
        for left in self.root.glob(f".{kind}-*"):
            shutil.rmtree(left)


def _mounted_names() -> set[str]:
    """Every folder name in the source path of any mount, in all mount namespaces (proc(5), mountinfo)."""
    names: set[str] = set()
    namespaces: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            namespace = str((process / "ns/mnt").readlink())
            if namespace not in namespaces:
                lines = (process / "mountinfo").read_text().splitlines()
                names.update(name for line in lines for name in line.split()[3].split("/"))
        except OSError:  # exited meanwhile
            continue
        namespaces.add(namespace)
    return names
