"""What is kept of an earlier release."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.releases.definitions import Schema, schemas

RELEASES = Path(__file__).parent / "recorded"
INPUTS = Path("/tmp/spotune-releases")
"""Models and data of the recorded jobs: their paths are part of a job's fingerprint, so they cannot move."""
NUMERICS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Variables with which the sums of a processor do not depend on its kind."""


@dataclass(frozen=True)
class Release:
    """A recorded release; `tests/releases/README.md` describes its files."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def about(self) -> dict[str, Any]:
        """`release.json`: commit, date and version."""
        content: dict[str, Any] = json.loads((self.folder / "release.json").read_text())
        return content

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """The schema of each kind."""
        return schemas(gzip.decompress((self.folder / "crd.yaml.gz").read_bytes()).decode())

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        """Running jobs and services: `body`, `status` and `children`."""
        return self._list("children.json.gz")

    @cached_property
    def valid(self) -> list[dict[str, Any]]:
        """Objects that the release accepted."""
        return self._list("valid.json.gz")

    def _list(self, name: str) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = json.loads(gzip.decompress((self.folder / name).read_bytes()))
        return content

    def unpack(self, folder: Path) -> Path:
        """Unpack the job directories into a folder, and their inputs to the place that the jobs name."""
        with tarfile.open(self.folder / "directories.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        inputs = INPUTS / self.name
        if not inputs.exists():
            INPUTS.mkdir(exist_ok=True)
            copy = INPUTS / f".{self.name}-{os.getpid()}"
            shutil.copytree(folder / "inputs", copy)
            try:
                copy.rename(inputs)
            except OSError:  # another test was first
                shutil.rmtree(copy)
        return folder


def check_out(revision: str, folder: Path) -> None:
    """Put the files of a commit into a new folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "--extract", f"--directory={folder}"], input=archive, check=True)


def releases() -> list[Release]:
    """All recorded releases, the oldest first."""
    found = [Release(file.parent) for file in RELEASES.glob("*/release.json")]
    return sorted(found, key=lambda release: str(release.about["date"]))
