"""Builds the images of the Dockerfile with buildah, on a Debian of this machine's apt, as archives for a test cluster.

apt-get install buildah
python -m tests.cluster.own_images build/images       # operator.tar, trainer.tar, serve.tar; prints what a node pulls
python -m tests.cluster.own_images build/images serve-vllm              # this one alone
spotune-testcluster load-image build/images/trainer.tar
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests import ROOT

BASE = "localhost/python:3.11"
TARGETS = ("operator", "trainer", "serve")
VLLM_TARGET = "serve-vllm"
"""Built only when it is asked for: nothing here can run it without a GPU."""
_PACKAGES = "python3,python3-venv,ca-certificates"
_RELEASE = "bookworm"  # whose Python is 3.11
_COMPILE = "python3 -S -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.11"
_HOOK = f'--customize-hook=PYTHONHASHSEED=0 chroot "$1" {_COMPILE}'
"""Debian's bytecode names the times of its modules, which all become SOURCE_DATE_EPOCH."""
SOURCE_DATE_EPOCH = 1580601600
"""The time of all files of an image, 2 February 2020, as in wheels: with that of the build, each layer would be new."""
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""This machine's certificates: a proxy to its package registries may have its own."""


def image_name(target: str) -> str:
    """The default name of the image in the chart and the operator."""
    return f"spotune/{target}:{version('spotune')}"


@dataclass(frozen=True)
class Buildah:
    """buildah with a separate store."""

    store: Path

    def __call__(self, *arguments: str) -> str:
        """Run buildah and return its output."""
        command = ["buildah", f"--root={self.store / 'root'}", f"--runroot={self.store / 'run'}", *arguments]
        environment = {**os.environ, "STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment).stdout

    def make_base(self) -> None:
        """Make a Debian with Python, for all base images."""
        with tempfile.NamedTemporaryFile(suffix=".tar", dir=self.store) as archive:
            install = ("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={_PACKAGES}", _HOOK)
            environment = {**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH)}
            subprocess.run([*install, _RELEASE, archive.name], check=True, env=environment)
            container = self("from", "scratch").strip()
            self("add", "--quiet", container, archive.name, "/")
        self("commit", "--quiet", "--rm", f"--timestamp={SOURCE_DATE_EPOCH}", container, BASE)

    def build(self, target: str) -> None:
        """Build a target of the Dockerfile on that base."""
        name = (
            "--target",
            target,
            "--tag",
            f"localhost/{image_name(target)}",
            f"--build-arg=VERSION={version('spotune')}",
            f"--timestamp={SOURCE_DATE_EPOCH}",
            "--no-hosts",  # /etc/hosts of an image would name this machine
        )
        trust = [f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro"]
        trust += [f"--env={variable}={_CERTIFICATES}" for variable in ("SSL_CERT_FILE", "PIP_CERT")]
        self("build", "--layers", "--network=host", "--quiet", *name, f"--build-arg=PYTHON_BASE={BASE}", *trust, ".")

    def save(self, target: str, folder: Path) -> Path:
        """Save an image as an archive, under its name in clusters."""
        archive = folder / f"{target}.tar"
        archive.unlink(missing_ok=True)
        name = image_name(target)
        self("push", "--quiet", f"localhost/{name}", f"docker-archive:{archive}:docker.io/{name}")
        return archive

    def manifest(self, target: str) -> dict[str, Any]:
        """The manifest of an image as a registry gets it: digests and sizes of its configuration and layers."""
        with tempfile.TemporaryDirectory(dir=self.store) as folder:
            self("push", "--quiet", "--format=oci", f"localhost/{image_name(target)}", f"dir:{folder}")
            found: dict[str, Any] = json.loads((Path(folder) / "manifest.json").read_text())
        return found

    def pulled_bytes(self, target: str) -> list[int]:
        """Compressed bytes of each layer above the base, the lowest first."""
        return [layer["size"] for layer in self.manifest(target)["layers"][1:]]


def build_all(folder: Path, buildah: Buildah, targets: Sequence[str] = TARGETS) -> None:
    """Build images, and save them as archives in a folder."""
    buildah.store.mkdir(parents=True, exist_ok=True)
    buildah.make_base()
    for target in targets:
        buildah.build(target)
        archive = buildah.save(target, folder)
        layers = [f"{size / 1e6:,.1f}" for size in buildah.pulled_bytes(target)]
        sys.stdout.write(f"{archive}: above its base a node pulls layers of {', '.join(layers)} MB\n")
        sys.stdout.flush()


if __name__ == "__main__":
    target_folder = Path(sys.argv[1]).resolve()
    build_all(target_folder, Buildah(target_folder / "store"), sys.argv[2:] or TARGETS)
