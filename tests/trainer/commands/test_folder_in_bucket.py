"""The folder in which a command keeps checkpoints of its own: what the next generation finds of it on other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.commands.folder_in_bucket import CheckpointFolder
from tests.trainer.support import buckets
from tests.trainer.training_functions.test_worker import content_of


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with buckets.open_bucket("s3") as server:
        yield Bucket(f"{server.url}/job")


class Node:
    """A node of a generation, with an empty disk."""

    def __init__(self, bucket: Bucket, tmp_path: Path, generation: int, node: int) -> None:
        bucket.write(f"generations/{generation:07d}/restored.json", b"{}")
        self.folder = tmp_path / f"gen-{generation}-node-{node}"
        self.checkpoints = CheckpointFolder(bucket, self.folder, generation, node, lambda: None)
        self.checkpoints.pull()

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)

    def push(self) -> None:
        self.checkpoints.push()

    @property
    def content(self) -> dict[str, bytes]:
        return content_of(self.folder)


def test_the_next_generation_finds_what_all_nodes_have_left(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (Node(bucket, tmp_path, 1, node) for node in range(2))
    first.write("step-1/state", b"1")
    first.push()
    second.write("step-1/shard-1", b"of node 1")
    second.push()
    nodes = [Node(bucket, tmp_path, 2, node) for node in range(2)]
    found = {"step-1/state": b"1", "step-1/shard-1": b"of node 1"}
    assert [node.content for node in nodes] == [found, found]

    (nodes[0].folder / "step-1/state").unlink()
    (nodes[1].folder / "step-1/shard-1").unlink()
    nodes[0].write("step-2/state", b"2")
    for node in nodes:
        node.push()
    assert Node(bucket, tmp_path, 3, 0).content == {"step-2/state": b"2"}
    kept = [name for name in bucket.list("command") if not name.endswith(".json")]
    assert len(kept) == 1, f"objects that nobody reads stay: {kept}"


def test_what_a_superseded_generation_still_writes_is_not_read(bucket: Bucket, tmp_path: Path) -> None:
    superseded = Node(bucket, tmp_path, 1, 0)
    superseded.write("state", b"1")
    superseded.push()
    Node(bucket, tmp_path, 2, 0)
    superseded.write("state", b"another")
    superseded.push()
    assert Node(bucket, tmp_path, 2, 1).content == {"state": b"1"}
    assert Node(bucket, tmp_path, 3, 0).content == {"state": b"1"}


def test_files_that_appear_together_appear_together_in_the_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(bucket, tmp_path, 1, 0)
    node.write("new/state", b"state")
    node.write("new/optimizer", b"optimizer")
    upload = Bucket.upload

    def lose_the_machine(*arguments: object) -> None:
        if str(arguments[2]).endswith("state"):
            raise BucketError("the connection was lost")
        upload(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", lose_the_machine)
        with pytest.raises(BucketError):
            node.push()
    assert Node(bucket, tmp_path, 2, 0).content == {}


def test_a_file_that_is_being_written_is_left_for_the_next_time(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(bucket, tmp_path, 1, 0)
    node.write("log", b"a line")
    node.push()
    upload = Bucket.upload

    def write_meanwhile(*arguments: object) -> None:
        upload(*arguments)  # type: ignore[arg-type]
        node.write("log", b"a line, another and a third one")

    node.write("log", b"a line and another")
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", write_meanwhile)
        node.push()
    assert Node(bucket, tmp_path, 2, 0).content == {"log": b"a line"}


def test_a_disk_that_was_used_before_becomes_what_the_bucket_has(bucket: Bucket, tmp_path: Path) -> None:
    node = Node(bucket, tmp_path, 1, 0)
    node.write("state", b"1")
    node.push()
    stale = tmp_path / "gen-2-node-0"
    stale.mkdir()
    (stale / "state").write_bytes(b"0")
    (stale / "deleted").write_bytes(b"")
    os.utime(stale / "state", ns=(2**62, 2**62))
    assert Node(bucket, tmp_path, 2, 0).content == {"state": b"1"}


def test_a_damaged_file_is_named(bucket: Bucket, tmp_path: Path) -> None:
    node = Node(bucket, tmp_path, 1, 0)
    node.write("state", b"1")
    node.push()
    (name,) = (each for each in bucket.list("command") if not each.endswith(".json"))
    bucket.write(name, b"2")
    with pytest.raises(JobError, match=r"is damaged, which is state of SPOTUNE_CHECKPOINT_DIR"):
        Node(bucket, tmp_path, 2, 0)
