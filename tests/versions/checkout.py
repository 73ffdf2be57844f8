"""A clone of the commit with an environment of its own: the tests run in it as in any other checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests import ROOT

FOLDER = ROOT / "build/versions"
_CODE = ("api", "client", "operator", "serve", "trainer")


@dataclass(frozen=True)
class Checkout:
    """A clone of this repository with a `.venv` of a Python and, unless it is the pinned one, a Ray.

    Attributes:
        interpreter: Path of a Python, or its command: python3.12.
        ray: Version of Ray; empty for the pinned one.
    """

    interpreter: str
    ray: str = ""

    @cached_property
    def folder(self) -> Path:
        """Where the clone is."""
        said = subprocess.run([self.interpreter, "--version"], capture_output=True, text=True, check=True).stdout
        name = f"python-{'.'.join(said.split()[-1].split('.')[:2])}"  # Python 3.12.1
        return FOLDER / (f"{name}-ray-{self.ray}" if self.ray else name)

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / ".venv/bin/python"

    def prepare(self) -> None:
        """Check out the current commit, and install what `make setup` installs. Nothing is done twice."""
        if not (self.folder / ".git").exists():
            _run("git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(self.folder))
        _run("git", "fetch", "--quiet", str(ROOT), "HEAD", cwd=self.folder)
        _run("git", "checkout", "--quiet", "--detach", "FETCH_HEAD", cwd=self.folder)
        pip = [_uv(), "pip"]
        python = ["--quiet", "--python", str(self.python)]
        _run(_uv(), "venv", "--quiet", "--allow-existing", "--python", self.interpreter, str(self.folder / ".venv"))
        _run(*pip, "sync", *python, "--require-hashes", "--compile-bytecode", "constraints/dev.txt", cwd=self.folder)
        if self.ray:
            _run(*pip, "install", *python, "--compile-bytecode", f"ray[train,serve]=={self.ray}", cwd=self.folder)
        _run(*pip, "install", *python, "--no-deps", "--editable", ".", "--editable", "tests/cluster", cwd=self.folder)
        _run(str(self.python), "-m", "compileall", "-q", *_CODE, cwd=self.folder)

    def commit(self) -> str:
        """The tested commit."""
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout.strip()

    def version(self, distribution: str) -> str:
        """The version of an installed distribution, or of "python"."""
        code = (
            "import platform; print(platform.python_version())"
            if distribution == "python"
            else f"import importlib.metadata as m; print(m.version({distribution!r}))"
        )
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()


def _uv() -> str:
    return shutil.which("uv") or str(ROOT / ".uv/bin/uv")


def _run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "UV_COMPILE_BYTECODE_TIMEOUT": "3600"}  # a busy machine takes minutes for a file
    subprocess.run(command, cwd=cwd, env=environment, check=True)
