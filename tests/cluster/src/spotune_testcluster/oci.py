"""Writes container images into one OCI archive, without a builder or a registry.

The format: https://github.com/opencontainers/image-spec (image-layout, manifest, config, layer).
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEDIA_TYPE = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """One image of an archive.

    Attributes:
        name: The name with tag, as in pod specs.
        layers: Uncompressed tar files, the lowest first; images of one archive may share them.
        environment: Environment variables of its processes.
        entrypoint: The program and its arguments.
        user: User and group of its processes, "" for root.
    """

    name: str
    layers: Sequence[Path]
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})
    entrypoint: Sequence[str] = ()
    user: str = ""


def write_archive(images: Sequence[Image], archive: Path) -> None:
    """Write all `images` into one tar file, each layer once."""
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        layers = {
            path: _add_layer(tar, path) for path in dict.fromkeys(path for image in images for path in image.layers)
        }
        manifests = [_add_image(tar, image, [layers[path] for path in image.layers]) for image in images]
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


def write_layer(layer: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Write a layer of a few files (path: content and mode). The same files give the same bytes."""
    with tarfile.open(layer, "w") as tar:
        for name, (content, mode) in files.items():
            _add(tar, name, content, mode)


def _add_image(tar: tarfile.TarFile, image: Image, layers: list[dict[str, Any]]) -> dict[str, Any]:
    system = {"architecture": ARCHITECTURES[platform.machine()], "os": "linux"}
    run = {
        "Env": [f"{name}={value}" for name, value in image.environment.items()],
        "Entrypoint": list(image.entrypoint),
        "User": image.user,
    }
    content = {
        **system,
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    config = _add_object(tar, "config", content)
    manifest_type = f"{MEDIA_TYPE}.manifest.v1+json"
    manifest = _add_object(
        tar, "manifest", {"schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": layers}
    )
    return manifest | {"platform": system, "annotations": {"io.containerd.image.name": image.name}}


def _add_object(tar: tarfile.TarFile, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(content, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    _add(tar, f"blobs/sha256/{digest}", data)
    return {"mediaType": f"{MEDIA_TYPE}.{kind}.v1+json", "digest": f"sha256:{digest}", "size": len(data)}


def _add_layer(tar: tarfile.TarFile, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tar.add(path, f"blobs/sha256/{digest}")
    return {"mediaType": f"{MEDIA_TYPE}.layer.v1.tar", "digest": f"sha256:{digest}", "size": path.stat().st_size}


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
