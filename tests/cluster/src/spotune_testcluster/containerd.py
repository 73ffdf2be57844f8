"""Import archives of images into a containerd: a temporary one, or that of a running node."""

import re
from collections.abc import Sequence
from pathlib import Path

from spotune_testcluster.commands import ALONE, run

NAMESPACE = "k8s.io"

CONFIG = """version = 2
root = "{root}"
oom_score = 0
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[plugins."io.containerd.internal.v1.opt"]
  path = "/run/opt"
"""
IMPORT = f"""set -eu
mount -t tmpfs run /run
containerd --log-level warn --config "$1" &
tries=0
until ctr version >/dev/null 2>&1; do
  tries=$((tries + 1))
  [ $tries -lt 300 ] || exit 1
  sleep 0.1
done
ctr --namespace {NAMESPACE} images import --snapshotter overlayfs "$2"
# The label is the mark by which the CRI plugin knows its images.
for name in $(ctr --namespace {NAMESPACE} images list --quiet); do
  ctr --namespace {NAMESPACE} images label "$name" io.cri-containerd.image=managed
done
kill $!
wait $!
"""


def make_root(root: Path, archive: Path) -> None:
    """Fill the empty folder `root` with the state of a containerd that has unpacked the archive's images.

    Raises:
        ClusterError: The import failed; the message has the output of containerd.
    """
    config = root.with_name("containerd.toml")
    config.write_text(CONFIG.format(root=root))
    run([*ALONE, "sh", "-c", IMPORT, "import", str(config), str(archive)], f"importing {archive} into {root}")
    config.unlink()


def load_image(enter: Sequence[str], archive: Path) -> list[str]:
    """Import an archive (OCI layout or `docker save`) into a running node's containerd.

    Args:
        enter: Command prefix that runs a command inside the node: nsenter with its options.
        archive: An uncompressed tar file, by its path on the host.

    Returns:
        The names of the images in pod specs.

    Raises:
        ClusterError: The import failed; the message has the output of containerd.
    """
    command = [*enter, "ctr", "--namespace", NAMESPACE, "images", "import", "--snapshotter", "overlayfs", "-"]
    with archive.open("rb") as file:
        printed = run(command, f"importing {archive}", file)
    return re.findall(r"^unpacking (\S+)", printed, re.MULTILINE)
