"""The images for pods of a test cluster: their names, their content, and how they are built once."""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from spotune_testcluster import base_image, containerd, layers, oci
from spotune_testcluster.containerd import load_image
from spotune_testcluster.layers import Environment
from spotune_testcluster.store import SECONDS_KEPT, Store, key_of
from spotune_testcluster.template import MARKER, Images

__all__ = [
    "BASE",
    "GPU_DEVICE_PLUGIN",
    "PAUSE",
    "TRAINER",
    "Images",
    "build_images",
    "load_image",
    "prune_images",
    "write_extended_image",
]

PAUSE = "testcluster.local/pause:1"
BASE = "testcluster.local/base:1"
TRAINER = "testcluster.local/trainer:1"
GPU_DEVICE_PLUGIN = "testcluster.local/gpu-device-plugin:1"

# Increase it if the images change although their inputs do not.
REVISION = 1


def build_images(home: Path, repository: Path, gpu_plugin: Path, report: Callable[[str], None]) -> Images:
    """Return all images in the form that nodes need. Only missing parts are built.

    Args:
        home: Everything is kept below it, in `images/`.
        repository: The root of the checkout whose `.venv` and source the trainer image contains, at their own paths.
        gpu_plugin: The statically linked program of the GPU device plugin.
        report: Called with a line for each part that has to be built.

    Raises:
        CannotRunHereError: A requirement is missing on this machine; the message names what to install.
        ClusterError: A program failed; the message has its output.
    """
    store = Store(home / "images")
    environment = Environment.of(repository)
    template_key = key_of(
        REVISION, _base_key(), str(environment.venv), base_image.PAUSE_SOURCE.read_text(), _digest(gpu_plugin)
    )

    def make_template(entry: Path) -> None:
        base = _base_layer(store, report)
        report("importing the images into the nodes' template")
        _make_template(entry, base, gpu_plugin, environment)

    template = store.get("template", template_key, make_template) / "root"
    return Images(template, layers.get_layers(store, repository, report))


def write_extended_image(
    home: Path, repository: Path, name: str, layer: Path, variables: Mapping[str, str], archive: Path
) -> None:
    """Write an archive with an image that has one layer more than the trainer image, for `load_image`.

    Nodes have the lower layers already, and recognize them by their content.

    Args:
        home: As for `build_images`.
        repository: As for `build_images`.
        name: Name of the image with its tag.
        layer: Uncompressed tar file with the files of the layer.
        variables: Environment variables in addition to those of the trainer image.
        archive: The file to write.
    """
    environment = Environment.of(repository)
    with tempfile.TemporaryDirectory() as folder:
        lower = [_base_layer(Store(home / "images"), lambda _line: None)]
        for kind in layers.KINDS:
            marker = Path(folder) / f"{kind}.tar"
            oci.write_layer(marker, _marker(kind))
            lower.append(marker)
        image = oci.Image(name, [*lower, layer], environment={**_trainer_variables(environment), **variables})
        oci.write_archive([image], archive)


def build_layers(home: Path, repository: Path, report: Callable[[str], None]) -> None:
    """Build the parts of the images that need no program of `binaries`, and so can be built beside those.

    Args and raises: as `build_images`.
    """
    store = Store(home / "images")
    _base_layer(store, report)
    layers.get_layers(store, repository, report)


def prune_images(home: Path, in_use: Iterable[Images], unused_seconds: float = SECONDS_KEPT) -> list[Path]:
    """Remove templates and layers that no cluster needs any more. Returns the removed folders.

    Args:
        home: As for `build_images`.
        in_use: The images of all existing clusters, running or not.
        unused_seconds: Keep entries that were built or requested within this time.
    """
    store = Store(home / "images")
    keep = [path for images in in_use for path in (images.template, *images.layers.values())]
    kinds = ("base", "template", *layers.KINDS)
    return [removed for kind in kinds for removed in store.prune(kind, keep, unused_seconds)]


def _base_key() -> str:
    return key_of(REVISION, base_image.base_content())


def _base_layer(store: Store, report: Callable[[str], None]) -> Path:
    def make(entry: Path) -> None:
        report("installing a Debian for the base image")
        base_image.make_base_layer(entry)

    return store.get("base", _base_key(), make) / "layer.tar"


def _make_template(entry: Path, base: Path, gpu_plugin: Path, environment: Environment) -> None:
    pause = entry / "pause"
    base_image.compile_pause(pause)
    files = {"pause": (pause.read_bytes(), 0o755)}
    contents = {"pause": files, "gpuplugin": {"gpuplugin": (gpu_plugin.read_bytes(), 0o755)}}
    contents |= {kind: _marker(kind) for kind in layers.KINDS}
    tars = {name: entry / f"{name}.tar" for name in contents}
    for name, tar in tars.items():
        oci.write_layer(tar, contents[name])
    archive = entry / "images.tar"
    trainer = [base, *(tars[kind] for kind in layers.KINDS)]
    oci.write_archive(
        [
            oci.Image(PAUSE, [tars["pause"]], entrypoint=["/pause"], user="65535:65535"),
            oci.Image(BASE, [base]),
            oci.Image(TRAINER, trainer, environment=_trainer_variables(environment)),
            oci.Image(GPU_DEVICE_PLUGIN, [tars["gpuplugin"]], entrypoint=["/gpuplugin"]),
        ],
        archive,
    )
    root = entry / "root"
    root.mkdir()
    containerd.make_root(root, archive)
    for made in (pause, archive, *tars.values()):
        made.unlink()


def _marker(kind: str) -> dict[str, tuple[bytes, int]]:
    """The files of the layer in whose place nodes mount a large one."""
    return {MARKER: (kind.encode(), 0o644)}


def _trainer_variables(environment: Environment) -> dict[str, str]:
    path = f"{environment.venv / 'bin'}:{oci.PATH}"
    return {"PATH": path, "VIRTUAL_ENV": str(environment.venv), "LANG": "C.UTF-8"}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
