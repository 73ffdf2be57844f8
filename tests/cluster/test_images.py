"""The images of the test cluster, tested without a cluster."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest

from spotune_testcluster import oci
from spotune_testcluster.errors import CannotRunHereError, ClusterError
from spotune_testcluster.images import Images, load_image
from spotune_testcluster.layers import Environment, get_layers
from spotune_testcluster.store import Store
from spotune_testcluster.template import CONTENT, MARKER, METADATA, SNAPSHOTTER, mount_template


def fill(entry: Path) -> None:
    (entry / "content").write_text("made")


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- the store -------------------------------------------------------------------------------------------------------


def test_two_who_want_the_same_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make_slowly(entry: Path) -> None:
        made.append(entry)
        time.sleep(0.2)
        fill(entry)

    seen: list[str] = []

    def get() -> None:
        seen.append((Store(tmp_path).get("thing", "1", make_slowly) / "content").read_text())

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["made", "made"]
    assert len(made) == 1


def test_what_failed_halfway_is_not_there_and_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(entry: Path) -> None:
        fill(entry)
        raise ClusterError("no network")

    with pytest.raises(ClusterError, match="no network"):
        store.get("thing", "1", fail)
    assert not (tmp_path / "thing-1").exists()
    assert (store.get("thing", "1", fill) / "content").read_text() == "made"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["thing-1"]


def test_prune_keeps_what_is_needed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entries = [store.get("thing", key, fill) for key in ("unused", "in-use", "latest")]
    for age, entry in enumerate(reversed(entries)):
        os.utime(entry, (time.time(), time.time() - 60 * age - 60))
    asked_for_just_now = store.get("other", "1", fill)

    assert store.prune("thing", keep=[tmp_path / "thing-in-use/root"], unused_seconds=3600) == []
    assert store.prune("thing", keep=[tmp_path / "thing-in-use/root"], unused_seconds=0) == [tmp_path / "thing-unused"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        asked_for_just_now.name, "thing-in-use", "thing-latest",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_prune_keeps_what_is_mounted_in_another_namespace(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mounted = store.get("thing", "mounted", fill)
    store.get("thing", "latest", fill)
    target = tmp_path / "target"
    target.mkdir()
    script = f"mount --bind {mounted} {target} && echo done && read _"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"done\n"
        assert store.prune("thing", keep=[], unused_seconds=0) == []
        node.communicate(b"\n")
    assert store.prune("thing", keep=[], unused_seconds=0) == [mounted]


# -- archives ---------------------------------------------------------------------------------------------------------


def test_archive_holds_shared_layers_once_under_their_digests(tmp_path: Path) -> None:
    base, top = tmp_path / "base.tar", tmp_path / "top.tar"
    oci.write_layer(base, {"etc/name": (b"base", 0o644)})
    oci.write_layer(top, {"program": (b"top", 0o755)})
    archive = tmp_path / "images.tar"
    images = [oci.Image("a/base:1", [base]), oci.Image("a/top:1", [base, top], entrypoint=["/program"], user="7")]
    oci.write_archive(images, archive)

    with tarfile.open(archive) as tar:
        names = tar.getnames()
        assert len(names) == len(set(names))
        contents = {name: opened.read() for name in names if (opened := tar.extractfile(name))}
    for name, content in contents.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    index = json.loads(contents["index.json"])
    assert [entry["annotations"]["io.containerd.image.name"] for entry in index["manifests"]] == ["a/base:1", "a/top:1"]

    def blob(digest: str) -> bytes:
        return contents[f"blobs/{digest.replace(':', '/')}"]

    manifest = json.loads(blob(index["manifests"][1]["digest"]))
    config = json.loads(blob(manifest["config"]["digest"]))
    assert [blob(layer["digest"]) for layer in manifest["layers"]] == [base.read_bytes(), top.read_bytes()]
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert (config["config"]["Entrypoint"], config["config"]["User"]) == (["/program"], "7")


def test_loading_an_image_gives_the_archive_to_the_node_and_returns_the_names(tmp_path: Path) -> None:
    received = tmp_path / "received"
    node = ["sh", "-c", f'cat > {received}; echo "unpacking a.example/b:1 (sha256:00)...done"', "node"]
    assert load_image(node, write(tmp_path / "archive.tar", "archive")) == ["a.example/b:1"]
    assert received.read_text() == "archive"


def test_image_that_cannot_be_loaded_says_what_containerd_said(tmp_path: Path) -> None:
    node = ["sh", "-c", "echo 'ctr: invalid tar header' >&2; exit 1", "node"]
    with pytest.raises(ClusterError, match=r"archive.tar failed \(1\):\nctr: invalid tar header"):
        load_image(node, write(tmp_path / "archive.tar"))


# -- the trainer image's layers ---------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with an environment, in a folder without access for others. The interpreter's prefix is a link."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    write(closed / "python-3.11.7/bin/python3.11", "interpreter")
    write(closed / "python-3.11.7/lib/python3.11/os.py")
    (closed / "python-3.11").symlink_to("python-3.11.7")
    repository = closed / "repository"
    venv = repository / ".venv"
    write(venv / "pyvenv.cfg", f"home = {closed}/python-3.11/bin\nimplementation = CPython\nversion_info = 3.11.7\n")
    write(venv / "lib/python3.11/site-packages/torch/__init__.py")
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to(closed / "python-3.11/bin/python3.11")
    for name in ("api", "operator", "serve", "trainer"):
        module = write(repository / name / "package/module.py", "1")
        os.utime(module, ns=(1_600_000_000_123_456_789,) * 2)
    return repository


def below(layer: Path, path: Path) -> Path:
    return layer / path.relative_to("/")


def silent(_line: str) -> None:
    return


def test_layers_show_everything_at_its_own_path(repository: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    layers = get_layers(Store(tmp_path / "store"), repository, reported.append)
    library = repository / ".venv/lib/python3.11/site-packages/torch/__init__.py"
    assert below(layers["venv"], library).samefile(library)
    interpreter = (repository / ".venv/bin/python").readlink()
    assert below(layers["python"], interpreter.resolve()).read_text() == "interpreter"
    assert below(layers["python"], interpreter.parents[1]).readlink() == interpreter.parents[1].resolve()
    assert below(layers["source"], repository / "operator/package/module.py").read_text() == "1"
    assert len(reported) == 3
    assert get_layers(Store(tmp_path / "store"), repository, reported.append) == layers
    assert len(reported) == 3


def test_layers_are_open_to_users_other_than_root(repository: Path, tmp_path: Path) -> None:
    for layer in get_layers(Store(tmp_path / "store"), repository, silent).values():
        closed = below(layer, repository.parent)
        for folder in (closed, *(parent for parent in closed.parents if parent.is_relative_to(layer))):
            assert folder.stat().st_mode & 0o7777 == (0o1777 if folder.name == "tmp" else 0o755)


def test_source_keeps_its_times_and_is_independent_of_later_edits(repository: Path, tmp_path: Path) -> None:
    source = repository / "api/package/module.py"
    layer = get_layers(Store(tmp_path / "store"), repository, silent)["source"]
    assert below(layer, source).stat().st_mtime_ns == 1_600_000_000_123_456_789
    source.write_text("2")
    assert below(layer, source).read_text() == "1"
    edited = get_layers(Store(tmp_path / "store"), repository, silent)["source"]
    assert below(edited, source).read_text() == "2"


@pytest.mark.parametrize("changed", [".venv/lib/python3.11/site-packages/new.dist-info/METADATA", ".venv/.ready"])
def test_changed_environment_is_another_layer(repository: Path, tmp_path: Path, changed: str) -> None:
    before = get_layers(Store(tmp_path / "store"), repository, silent)
    write(repository / changed)
    after = get_layers(Store(tmp_path / "store"), repository, silent)
    assert {kind for kind in before if before[kind] != after[kind]} == {"venv"}
    assert below(after["venv"], repository / changed).exists()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no second file system")
def test_layers_are_copied_to_another_file_system(repository: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        layer = get_layers(Store(Path(other)), repository, silent)["venv"]
        library = repository / ".venv/lib/python3.11/site-packages/torch/__init__.py"
        assert not below(layer, library).samefile(library)
        assert below(layer, library).stat().st_mtime_ns == library.stat().st_mtime_ns


def test_environment_of_the_standard_library_is_understood(repository: Path) -> None:
    write(repository / ".venv/pyvenv.cfg", "home = /opt/python/bin\nversion = 3.11.7\nexecutable = /opt/x=y\n")
    environment = Environment.of(repository)
    assert (environment.prefix, environment.version) == (Path("/opt/python"), "3.11")


def test_missing_environment_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(CannotRunHereError, match="run make setup"):
        get_layers(Store(tmp_path / "store"), tmp_path, silent)


# -- the nodes' template ----------------------------------------------------------------------------------------------


MOUNT = """
import sys
from pathlib import Path
from spotune_testcluster.template import Images, mount_template
template, large, shown, disk = map(Path, sys.argv[1:])
mount_template(Images(template, {"venv": large}), shown, disk)
for file in sorted(shown.rglob("*")):
    if file.is_file():
        print(file.relative_to(shown), file.read_text())
"""


def make_template(template: Path, name: str) -> Path:
    write(template / METADATA / "meta.db", name)
    write(template / CONTENT / "blobs/sha256/0", name)
    write(template / SNAPSHOTTER / "metadata.db", name)
    write(template / SNAPSHOTTER / "snapshots/1/fs/base", name)
    write(template / SNAPSHOTTER / "snapshots/2/fs" / MARKER, "venv")
    return template


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_node_has_the_templates_images_and_keeps_its_own_databases(tmp_path: Path) -> None:
    template = make_template(tmp_path / "template", "first")
    other = make_template(tmp_path / "other", "second")
    large = write(tmp_path / "large/library", "large").parent
    disk = tmp_path / "node"

    def start(template: Path) -> set[str]:
        paths = [str(path) for path in (template, large, disk, disk)]
        command = ["unshare", "--mount", sys.executable, "-c", MOUNT, *paths]
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    expected = {
        f"{METADATA}/meta.db first",
        f"{CONTENT}/blobs/sha256/0 first",
        f"{SNAPSHOTTER}/metadata.db first",
        f"{SNAPSHOTTER}/snapshots/1/fs/base first",
        f"{SNAPSHOTTER}/snapshots/2/fs/library large",
    }
    assert expected <= start(template)
    assert (disk / CONTENT / "blobs/sha256/0").samefile(template / CONTENT / "blobs/sha256/0")

    (disk / METADATA / "meta.db").write_text("the node's own")
    write(disk / SNAPSHOTTER / "snapshots/3/fs/container")
    again = start(template)
    assert f"{METADATA}/meta.db the node's own" in again
    assert f"{SNAPSHOTTER}/snapshots/2/fs/library large" in again
    assert (template / METADATA / "meta.db").read_text() == "first"

    anew = start(other)
    assert f"{METADATA}/meta.db second" in anew
    assert not (disk / SNAPSHOTTER / "snapshots/3").exists()


def test_copy_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    disk = tmp_path / "node"
    write(disk / METADATA / "meta.db", "half")
    empty = tmp_path / "template"
    with pytest.raises(FileNotFoundError):
        mount_template(Images(empty, {}), disk, disk)
    assert not (disk / METADATA).exists()
