"""An earlier release for the test cluster: an image with its code, and its chart with its definitions.

The image is the trainer image with one layer more, which has the older packages and comes first on PYTHONPATH. The
libraries are those of today: what a release pins rarely matters to an upgrade, and another environment has 8 GB.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from spotune_testcluster import images
from spotune_testcluster.home import Home
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests import ROOT
from tests.releases.release import Release, check_out

IMAGE = "testcluster.local/older:1"
_FOLDER = "opt/older"
_PACKAGES = ("api", "client", "operator", "serve", "trainer")
PYTHON_PATH = ":".join(f"/{_FOLDER}/{name}" for name in _PACKAGES)
"""Where pods of the image find the older packages; not every release has all of them."""


@dataclass(frozen=True)
class OlderRelease:
    """An earlier release in the cluster.

    Attributes:
        release: What is recorded of it.
        chart: Its chart.
    """

    release: Release
    chart: Path


def load(cluster: ClusterUnderTest, release: Release, folder: Path) -> OlderRelease:
    """Check out the code of a release into a folder, and load its image into all nodes."""
    machine = cluster.machine_for("loading an image")
    code = folder / "code"
    check_out(release.about["commit"], code)
    archive = folder / "image.tar"
    write_image(code, archive)
    for node in cluster.nodes:
        images.load_image(machine.way_in(node), archive)
    return OlderRelease(release, code / "charts/spotune")


def write_image(code: Path, archive: Path) -> None:
    """Write the image of a checkout as an archive."""
    layer = archive.with_suffix(".layer.tar")
    packages = [code / name for name in _PACKAGES if (code / name).exists()]
    # Bytecode that is never compared with the source: pods cannot write any.
    compile_all = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash")
    subprocess.run([*compile_all, *map(str, packages)], check=True)
    with tarfile.open(layer, "w") as tar:
        for package in packages:
            tar.add(package, f"{_FOLDER}/{package.name}", filter=_readable)
    images.write_extended_image(Home.default().root, ROOT, IMAGE, layer, {"PYTHONPATH": PYTHON_PATH}, archive)
    layer.unlink()


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """As root's, readable by the users of pods."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o555 if member.isdir() else 0o444
    return member
