"""A node's containerd that has every image from its first moment, because its disk is made from a template.

The template is the root folder of a containerd that imported the images once. A node gets copies of its two databases,
hard links to its blobs, and its unpacked layers by read-only bind mounts. Instead of a layer too large to import, the
template has a stub with a marker file that names the layer's kind; the real directory is mounted there.

    /var/lib/containerd
        io.containerd.metadata.v1.bolt/meta.db               copied
        io.containerd.content.v1.content/blobs/              linked
        io.containerd.snapshotter.v1.overlayfs/metadata.db   copied
        io.containerd.snapshotter.v1.overlayfs/snapshots/N/fs  mounted: the template's, or a large layer
"""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spotune_testcluster import linux

MARKER = ".testcluster-layer"
METADATA = "io.containerd.metadata.v1.bolt"
CONTENT = "io.containerd.content.v1.content"
SNAPSHOTTER = "io.containerd.snapshotter.v1.overlayfs"
MADE_FROM = "made-from-template"


@dataclass(frozen=True)
class Images:
    """What a node's containerd is made from.

    Attributes:
        template: The root folder of a containerd with all images.
        layers: The directories of the layers too large to import, by their kind.
    """

    template: Path
    layers: Mapping[str, Path]


def mount_template(images: Images, containerd_root: Path, link_root: Path) -> None:
    """Give a node all images, before its containerd starts, in the node's mount namespace.

    A node that starts again keeps its containers and what was loaded into it, and sees the layers as given now. Only
    where the template is another one than before, containerd begins anew.

    Args:
        images: All of them.
        containerd_root: Where the node's containerd keeps its files; made when missing.
        link_root: The same folder by a path that no bind mount lies on, where hard links from the template can lead.
    """
    containerd_root.mkdir(parents=True, exist_ok=True)
    made_from = link_root / MADE_FROM
    if not made_from.exists() or made_from.read_text() != str(images.template):
        _copy(images.template, link_root)
    for snapshot in _snapshots(images.template):
        shown = containerd_root / SNAPSHOTTER / "snapshots" / snapshot.name / "fs"
        linux.bind(_layer(snapshot, images.layers), shown, read_only=True)


def _copy(template: Path, root: Path) -> None:
    """All but the layers; a copy that was interrupted lacks the last file and is done again."""
    for left in root.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    shutil.copytree(template / METADATA, root / METADATA)
    shutil.copytree(template / CONTENT, root / CONTENT, copy_function=_link)
    for snapshot in _snapshots(template):
        for name in ("fs", "work"):
            (root / SNAPSHOTTER / "snapshots" / snapshot.name / name).mkdir(parents=True)
    shutil.copy2(template / SNAPSHOTTER / "metadata.db", root / SNAPSHOTTER)
    unfinished = root / f".{MADE_FROM}"
    unfinished.write_text(str(template))
    unfinished.rename(root / MADE_FROM)


def _snapshots(template: Path) -> list[Path]:
    return sorted((template / SNAPSHOTTER / "snapshots").iterdir())


def _layer(snapshot: Path, layers: Mapping[str, Path]) -> Path:
    marker = snapshot / "fs" / MARKER
    return layers[marker.read_text()] if marker.exists() else snapshot / "fs"


def _link(source: str, target: str) -> None:
    """A hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)
