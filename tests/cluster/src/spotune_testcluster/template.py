"""Gives a new node's containerd every image, by making its disk from a template.

The template is the root folder of a containerd that imported the images once. A node gets copies of its two databases,
hard links to its blobs, and read-only bind mounts of its unpacked layers. For a layer that is too large to import, the
template has a stub: a marker file with the layer's kind. The real directory is mounted there.

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
    """All images of a node's containerd.

    Attributes:
        template: The root folder of a containerd with all images.
        layers: The directories of the layers that are too large to import, by their kind.
    """

    template: Path
    layers: Mapping[str, Path]


def mount_template(images: Images, containerd_root: Path, link_root: Path) -> None:
    """Give a node all images. Call it in the node's mount namespace before its containerd starts.

    A restarted node keeps its containers and the images that were loaded into it, and gets the current layers. If the
    template has changed, containerd starts with an empty state.

    Args:
        images: All images.
        containerd_root: Root folder of the node's containerd; made if it is missing.
        link_root: The same folder by a path without a bind mount, because hard links cannot cross mounts.
    """
    containerd_root.mkdir(parents=True, exist_ok=True)
    made_from = link_root / MADE_FROM
    if not made_from.exists() or made_from.read_text() != str(images.template):
        _copy(images.template, link_root)
    for snapshot in _snapshots(images.template):
        shown = containerd_root / SNAPSHOTTER / "snapshots" / snapshot.name / "fs"
        linux.bind(_layer(snapshot, images.layers), shown, read_only=True)


def _copy(template: Path, root: Path) -> None:
    """Copy everything but the layers. An interrupted copy lacks the last file and is repeated at the next start."""
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
    """Make a hard link, or a copy if the target is on another file system."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)
