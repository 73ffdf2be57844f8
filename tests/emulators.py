"""Emulators of Google's and Azure's object stores for tests, of pinned versions: `make emulators` installs them.

They lie outside the checkout, so that a fresh clone finds them. A test whose emulator is not installed is skipped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotune" / "emulators"


@dataclass(frozen=True)
class Emulator:
    """A program that an ordinary package client installs.

    Attributes:
        package: What is installed, with its version.
        tool: The package client.
        program: The installed program, relative to the folder of the package.
    """

    package: str
    tool: str
    program: str

    @property
    def path(self) -> Path:
        """The program, which exists if it is installed."""
        return FOLDER / self.package.replace("/", "-") / self.program

    def install(self) -> str:
        """Install it unless it is installed. Returns what was done, or why it cannot be."""
        if self.path.exists():
            return "installed"
        if shutil.which(self.tool) is None:
            return f"not installed, its tests are skipped: it needs {self.tool}"
        began = time.monotonic()
        folder = FOLDER / self.package.replace("/", "-")
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            self._install_into(Path(temporary) / "new")
            (Path(temporary) / "new").rename(folder)  # so that an interrupted installation leaves nothing behind
        return f"installed in {time.monotonic() - began:.0f} s"

    def _install_into(self, folder: Path) -> None:
        folder.mkdir()
        command: Sequence[str | Path]
        if self.tool == "go":
            command = ["go", "install", self.package]
        else:
            command = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", folder, self.package]
        subprocess.run(command, check=True, env={**os.environ, "GOBIN": str(folder)}, stdin=subprocess.DEVNULL)


GOOGLE = Emulator("github.com/fsouza/fake-gcs-server@v1.56.1", "go", "fake-gcs-server")
AZURE = Emulator("azurite@3.35.0", "npm", "node_modules/.bin/azurite-blob")


def main() -> None:
    """Install what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for emulator in (GOOGLE, AZURE):
            print(f"{emulator.package}: {emulator.install()}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
