"""What torch.compile has made for a job, kept on the job's storage so that the next start does not compile again.

While a process compiles, the compiler keeps its results in a folder of this machine: traced graphs, generated code,
and the binaries of kernels, launchers and C++. After the first steps one rank packs that folder into a file. The next
start unpacks it before it compiles anything, and the compiler finds its results in place.

PyTorch has a file format for the same purpose (`torch.compiler.save_cache_artifacts`). It leaves out the binaries that
a C or C++ compiler has made, so that a start from it compiles these again.

The file is code: whoever can write it can run code in the workers. So it is only read from the job's own storage, and
from a folder that the environment names (`SPOTUNE_COMPILE_CACHE`), which an image can contain.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from spotune.errors import InfrastructureError
from spotune_trainer import files

logger = logging.getLogger("spotune.worker")

IMAGE_FOLDER: Final = "SPOTUNE_COMPILE_CACHE"
"""Environment variable with a folder of the image, which is read if the job's storage has nothing."""
_KEY_FILE: Final = "key.json"
_IGNORED_FOLDERS: Final = ("locks", "precompiled_headers")
_IGNORED_SUFFIXES: Final = (".lock", ".gch", ".tmp")
_BUILDING: Final = "CxxBuild"
"""Ends the name of the folder that the compiler has beside a C++ binary while it builds it (`cpp_builder.py`)."""
_COMPRESSION: Final = 1
_DAMAGED: Final = (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, KeyError)


class CompileCache:
    """The file with the compiled code of one key.

    Args:
        folder: in the job's directory; shared by all ranks and generations.
        key: what the code depends on (`cache_key.py`).
        local: folder of this machine for the compiler; shared by the ranks of a generation.
        writes: whether this rank writes the file; one rank does.
        publish: called with the file after it was written, in the thread that has written it.
    """

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, Any],
        local: Path,
        *,
        writes: bool,
        publish: Callable[[Path], None] | None = None,
    ) -> None:
        self._key = dict(key)
        self._local = local
        self._writes = writes
        self._publish = publish
        self._kept: set[str] = set()
        self._thread: threading.Thread | None = None
        device = re.sub(r"[^a-zA-Z0-9]+", "-", str(self._key.get("device", "cpu"))).strip("-")
        self.path = folder / f"{device}-{files.content_key(self._key)}.tar.gz"

    def load(self) -> str:
        """Let this process compile in the local folder, and fill that from the file if it does not exist yet.

        A missing, damaged or foreign file only means that everything is compiled again.

        Returns:
            Where the file is that was read: "job" or "image"; "node" if another rank has filled the folder; empty if
            there is nothing to read.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._local)
        os.environ["TRITON_CACHE_DIR"] = str(self._local / "triton" / os.environ.get("LOCAL_RANK", "0"))
        source = self._fill()
        self._kept = {name for name, _ in self._found()} if source else set()
        return source

    def save(self) -> None:
        """Write the file in a thread, if the folder has anything that the file has not."""
        if not self._writes or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._write, name="compile-cache", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write that `save` started."""
        if self._thread is not None:
            self._thread.join()

    def _fill(self) -> str:
        if self._local.exists():
            return "node"
        image = os.environ.get(IMAGE_FOLDER)
        sources = {"job": self.path, **({"image": Path(image) / self.path.name} if image else {})}
        for source, path in sources.items():
            if path.exists() and self._unpack(path):
                return source
        self._local.mkdir(parents=True, exist_ok=True)
        return ""

    def _unpack(self, path: Path) -> bool:
        """Make the local folder from a file, all of it or nothing. Returns False if the file cannot be used."""
        try:
            content = gzip.decompress(path.read_bytes())  # verifies the checksum before anything is unpacked
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                stream = archive.extractfile(_KEY_FILE)
                if stream is None or json.load(stream) != self._key:
                    logger.warning("the compile cache %s was made for something else: it is ignored", path)
                    return False
                self._local.parent.mkdir(parents=True, exist_ok=True)
                unpacked = Path(tempfile.mkdtemp(dir=self._local.parent, prefix=".unpacking-"))
                try:
                    archive.extractall(unpacked, filter="data")
                    with suppress(OSError):  # another rank was faster
                        unpacked.rename(self._local)
                finally:
                    shutil.rmtree(unpacked, ignore_errors=True)
        except _DAMAGED as error:
            logger.warning("the compile cache %s is damaged (%s): it is ignored", path, error)
            return False
        return self._local.exists()

    def _found(self) -> Iterator[tuple[str, Path]]:
        """The files of the local folder that are worth keeping, by their names in the archive."""
        for path in sorted(self._local.rglob("*")):
            relative = path.relative_to(self._local)
            if relative.parts[0] in _IGNORED_FOLDERS or path.suffix in _IGNORED_SUFFIXES:
                continue
            if path.is_file() and str(relative) != _KEY_FILE:
                yield str(relative), path

    def _write(self) -> None:
        try:
            contents = {name: content for name, path in self._found() if (content := _read_whole(path)) is not None}
            if contents.keys() <= self._kept:
                return
            self.path.parent.mkdir(exist_ok=True)
            files.write_bytes(self.path, _pack(self._key, contents))
            self._kept = set(contents)
            if self._publish is not None:
                self._publish(self.path)
        except (OSError, InfrastructureError) as error:
            logger.warning("could not write the compile cache %s: %s", self.path.name, error)


def local_folder(directory: Path, generation: int) -> Path:
    """The folder of this machine in which the ranks of a generation compile. Those of earlier generations are removed.

    Raises:
        InfrastructureError: it belongs to another user.
    """
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"spotune-compiled-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise InfrastructureError(f"{folder} belongs to another user: remove it")
    for earlier in folder.glob("gen-*"):
        if int(earlier.name.removeprefix("gen-")) < generation:
            shutil.rmtree(earlier, ignore_errors=True)
    return folder / f"gen-{generation}"


def _read_whole(path: Path) -> bytes | None:
    """The content of a file; None if another rank is still writing it, or has removed it."""

    def is_being_built() -> bool:
        return any(path.parent.glob(f"{path.stem}*{_BUILDING}"))

    try:
        before = path.stat()
        if is_being_built():
            return None
        content = path.read_bytes()
        after = path.stat()
    except FileNotFoundError:
        return None
    is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return content if is_same and not is_being_built() else None


def _pack(key: Mapping[str, Any], contents: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=_COMPRESSION) as archive:
        for name, content in {_KEY_FILE: json.dumps(key).encode(), **contents}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), int(time.time())
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
