"""Shared memory of a node: commits alternate between two segments, and what no group can start from is overwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.checkpoint.memory.segment import Label, Segment

SIZE = 10_000


def label(step: int, rank: int = 0) -> Label:
    return Label(f"step-{step}", f"rank-{rank}", SIZE, "ab")


def commit(memory: RankMemory, step: int, rank: int = 0, size: int = SIZE) -> Segment:
    segment = memory.begin(size)
    memory.complete(segment, label(step, rank))
    return segment


def share(node: NodeMemory, ranks: int = 1, copies: int = 2, restore: int | None = None) -> list[RankMemory]:
    """The memory of the ranks. All of the machine's is free, whatever else runs on it."""
    name = f"step-{restore}" if restore else None
    found = [memory for memory in node.share(ranks, copies, name) if memory is not None]
    return [replace(memory, free_bytes=machine_memory_bytes) for memory in found]


def allocated(node: NodeMemory) -> int:
    return sum(segment.content_bytes for segment in node._segments())


def test_the_last_commit_stays_while_the_next_one_is_written() -> None:
    (memory,) = share(NodeMemory())
    first, second = commit(memory, 5), commit(memory, 10)
    assert first is not second
    third = memory.begin(SIZE)
    assert third is first
    assert (first.label, second.label) == (None, label(10))


def test_one_copy_takes_one_segment() -> None:
    node = NodeMemory()
    (memory,) = share(node, copies=1)
    assert commit(memory, 5) is commit(memory, 10)
    assert allocated(node) == SIZE


def test_the_next_group_keeps_what_it_starts_from_and_writes_beside_it() -> None:
    node = NodeMemory()
    (memory,) = share(node)
    first, second = commit(memory, 5), commit(memory, 10)
    (following,) = share(node, restore=5)
    assert following.node == (first,)
    assert second.label is None, "nothing can start from a commit that the next group does not start from"
    assert following.begin(SIZE) is second
    assert first.label == label(5)


def test_a_group_that_starts_from_elsewhere_finds_nothing() -> None:
    node = NodeMemory()
    segment = commit(share(node)[0], 5)
    (following,) = share(node, restore=7)
    assert following.node == ()
    assert commit(following, 10) is segment
    assert allocated(node) == SIZE


def test_a_rank_that_is_gone_leaves_no_memory_behind_that_nothing_starts_from() -> None:
    node = NodeMemory()
    for rank, memory in enumerate(share(node, 2)):
        commit(memory, 5, rank)
        commit(memory, 10, rank)
    (following,) = share(node, 1, restore=10)
    assert len(following.node) == 2
    assert allocated(node) == 3 * SIZE, "its own two, and the one of the other rank that it starts from"


def test_nothing_is_kept_without_copies() -> None:
    node = NodeMemory()
    commit(share(node)[0], 5)
    assert node.share(2, 0, "step-5") == [None, None]
    assert allocated(node) == 0


@pytest.mark.parametrize("copies", [1, 2])
def test_segments_of_ranks_that_are_gone_are_freed_when_a_commit_replaces_them(copies: int) -> None:
    node = NodeMemory()
    for rank, memory in enumerate(share(node, 3, copies)):
        commit(memory, 5, rank)
    (following,) = share(node, 1, copies, restore=5)
    assert len(following.node) == 3
    commit(following, 10, size=3 * SIZE)
    assert allocated(node) == (6 if copies == 2 else 3) * SIZE
    commit(following, 15, size=3 * SIZE)
    assert allocated(node) == 3 * copies * SIZE


def test_preparing_allocates_but_destroys_nothing_that_is_needed() -> None:
    node = NodeMemory()
    commit(share(node, copies=1)[0], 5)
    (following,) = share(node, copies=1, restore=5)
    assert following.prepare(SIZE) is following.own[0]
    assert following.prepare(2 * SIZE) is None
    assert following.own[0].label == label(5)
    (fresh,) = share(NodeMemory())
    prepared = fresh.prepare(SIZE)
    assert prepared is not None
    assert prepared.content_bytes == SIZE


def test_the_second_copy_is_given_up_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    node = NodeMemory()
    (memory,) = share(node)
    memory = replace(memory, free_bytes=lambda: machine_memory_bytes() // 10)
    assert commit(memory, 5) is commit(memory, 10)
    assert allocated(node) == SIZE
    assert "one snapshot of a commit is kept in memory instead of two: a second one of each of 1 ranks" in caplog.text
    assert len(caplog.records) == 1


def test_all_memory_is_given_back() -> None:
    node = NodeMemory()
    for memory in share(node, 2):
        commit(memory, 5)
    assert allocated(node) == 2 * SIZE
    node.free()
    assert allocated(node) == 0
