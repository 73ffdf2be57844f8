"""Builds images of the Dockerfile twice from scratch, base included, and compares them byte by byte.

python -m tests.cluster.reproducible_images build/reproducible operator     # as root, with buildah and mmdebstrap
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.own_images import Buildah

Contents = dict[str, str]
"""What is known of each file of an archive, by its path: owner, mode, time, and a hash of the content."""


def contents(archive: tarfile.TarFile) -> Contents:
    """The files of a layer."""
    found: Contents = {}
    for member in archive:
        file = archive.extractfile(member) if member.isfile() else None
        digest = hashlib.sha256(file.read()).hexdigest()[:12] if file else member.linkname
        found[member.name] = f"{member.uid}:{member.gid} {member.mode:o} {member.mtime} {digest}"
    return found


def differences(first: Path, second: Path) -> list[str]:
    """Paths in two archives of images that are not the same, each with what it was and what it is."""
    was, now = (_all_layers(path) for path in (first, second))
    return [
        f"{name}: {was.get(name, 'missing')} -> {now.get(name, 'missing')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]


def _all_layers(path: Path) -> Contents:
    found: Contents = {}
    with tarfile.open(path) as image:
        (manifest,) = json.load(_member(image, "manifest.json"))
        found["configuration"] = hashlib.sha256(_member(image, manifest["Config"]).read()).hexdigest()
        for index, layer in enumerate(manifest["Layers"]):
            with tarfile.open(fileobj=_member(image, layer)) as archive:
                found |= {f"layer {index}: {name}": about for name, about in contents(archive).items()}
    return found


def _member(archive: tarfile.TarFile, name: str) -> Any:
    return archive.extractfile(name)


def main(folder: Path, targets: Sequence[str]) -> int:
    """Build, compare and print the digests; the exit code says whether all are the same."""
    stores = [folder / name for name in ("first", "second")]
    differ = False
    for store in stores:
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
    builders = [Buildah(store) for store in stores]
    for buildah in builders:
        buildah.make_base()
    for target in targets:
        manifests, archives = [], []
        for buildah in builders:
            buildah.build(target)
            manifests.append(buildah.manifest(target))
            archives.append(buildah.save(target, buildah.store))
        is_same = manifests[0] == manifests[1]
        differ |= not is_same
        digests = " and ".join(dict.fromkeys(manifest["config"]["digest"] for manifest in manifests))
        sys.stdout.write(f"{target}: {'the same twice' if is_same else 'DIFFERENT'}, image {digests}\n")
        if not is_same:
            sys.stdout.writelines(f"  {line}\n" for line in differences(*archives)[:50])
        sys.stdout.flush()
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:] or ("operator",)))
