"""Commits on their way to another node: complete ones only, the newest, and no faster than asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.layout import MANIFEST, CheckpointName
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.peer_connection import CHUNK_BYTES, PeerError
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label
from tests.trainer.support.peers import Node, nodes
from tests.trainer.support.waiting import wait_until

SIZE = 10_000
_PATIENCE_SECONDS = 60.0


@pytest.fixture
def pair() -> Iterator[list[Node]]:
    """Two nodes with a rank each, in generation 1."""
    with nodes(2) as started:
        yield started


def write(memory: RankMemory, step: int, rank: int = 0, generation: int = 1, size: int = SIZE) -> Label:
    """A rank's part in a commit."""
    data = bytes([step]) * size
    segment = memory.begin(size)
    with segment.map() as mapped:
        mapped[LABEL_BYTES:] = data
    name = str(CheckpointName(step, generation))
    label = Label(name, f"rank-{rank}", size, xxhash.xxh3_64(data).hexdigest())
    memory.complete(segment, label)
    return label


def complete(checkpoints: Path, label: Label) -> None:
    """Rank 0 writes the manifest."""
    (checkpoints / label.checkpoint).mkdir()
    (checkpoints / label.checkpoint / MANIFEST).touch()


def test_commit_is_sent_once_it_is_complete_and_only_once(pair: list[Node], tmp_path: Path) -> None:
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(1)
    sender = first.sender(second, tmp_path)
    label = write(memory, 5)
    assert not sender.send_newest(), "the commit is not complete"
    complete(tmp_path, label)
    assert sender.send_newest()
    segment = second.copies.find(label)
    assert segment is not None
    with segment.map() as mapped:
        assert mapped[LABEL_BYTES:] == bytes([5]) * SIZE
    assert not sender.send_newest()


def test_copy_stays_until_the_next_commit_is_complete(pair: list[Node], tmp_path: Path) -> None:
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(1)
    sender = first.sender(second, tmp_path)
    earlier = write(memory, 5)
    complete(tmp_path, earlier)
    sender.send_newest()
    later = write(memory, 10)
    assert not sender.send_newest()
    assert second.copies.find(earlier) is not None
    complete(tmp_path, later)
    assert sender.send_newest()
    assert second.copies.find(later) is not None


def test_commit_before_the_last_one_is_not_sent_again(pair: list[Node], tmp_path: Path) -> None:
    """It stays in the second segment, and would replace the copy of the last one."""
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(1)
    sender = first.sender(second, tmp_path)
    earlier = write(memory, 5)
    complete(tmp_path, earlier)
    assert sender.send_newest()
    later = write(memory, 10)
    complete(tmp_path, later)
    assert sender.send_newest()
    assert not sender.send_newest()
    assert second.copies.find(later) is not None


def test_files_of_all_ranks_of_a_node_are_sent(pair: list[Node], tmp_path: Path) -> None:
    first, second = pair
    memories = first.begin(1, ranks=2)
    second.begin(1)
    sender = first.sender(second, tmp_path)
    labels = [write(memories[0], 5, rank=0)]
    complete(tmp_path, labels[0])
    assert not sender.send_newest(), "the other rank has not labelled its segment yet"
    labels.append(write(memories[1], 5, rank=1))
    assert sender.send_newest()
    assert all(second.copies.find(label) for label in labels)


def test_checkpoint_of_an_earlier_generation_is_not_sent(pair: list[Node], tmp_path: Path) -> None:
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(2)
    complete(tmp_path, write(memory, 5))
    assert not first.sender(second, tmp_path, generation=2).send_newest()
    with pytest.raises(PeerError, match="it refuses the copy, because generation 1 is not the current one, 2"):
        first.sender(second, tmp_path).send_newest()


def test_sender_without_the_secret_sends_nothing(pair: list[Node], tmp_path: Path) -> None:
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(1)
    label = write(memory, 5)
    complete(tmp_path, label)
    with pytest.raises(PeerError):
        first.sender(second, tmp_path, secret=b"guessed").send_newest()
    assert second.copies.find(label) is None


def test_node_without_spare_memory_refuses_the_copy(tmp_path: Path) -> None:
    with nodes(1) as (first,):
        second = Node(copies=PeerCopies(lambda: machine_memory_bytes() // 10))
        try:
            (memory,) = first.begin(1)
            second.begin(1)
            complete(tmp_path, write(memory, 5))
            with pytest.raises(PeerError, match=r"refuses the copy, because a copy of rank-0 needs 0\.0 GB"):
                first.sender(second, tmp_path).send_newest()
        finally:
            second.lose()


def test_thread_reports_a_lost_node_once_and_goes_on_without_it(
    pair: list[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = pair
    (memory,) = first.begin(1)
    complete(tmp_path, write(memory, 5))
    second.lose()
    sender = first.sender(second, tmp_path)
    sender.start()
    assert wait_until(lambda: "the last commit is not copied to node 127.0.0.1" in caplog.text, _PATIENCE_SECONDS)
    sender.stop()
    assert len(caplog.records) == 1


def test_limited_sender_waits_after_the_first_chunk(pair: list[Node], tmp_path: Path) -> None:
    """At a byte per second, the second chunk is due after twelve days."""
    first, second = pair
    (memory,) = first.begin(1)
    second.begin(1)
    label = write(memory, 5, size=3 * CHUNK_BYTES)
    complete(tmp_path, label)
    received: list[int] = []
    receive = second.copies.keep

    def counting(*arguments: object) -> None:
        received.append(0)
        receive(*arguments)  # type: ignore[arg-type]

    second.copies.keep = counting  # type: ignore[method-assign, assignment]
    sender = first.sender(second, tmp_path, bytes_per_second=1)
    sender.start()
    assert wait_until(lambda: bool(received), _PATIENCE_SECONDS)
    assert second.copies.find(label) is None
    sender.stop()
    sender._thread.join(_PATIENCE_SECONDS)
    assert not sender._thread.is_alive(), "it ends while it waits"
    assert second.copies.find(label) is None
