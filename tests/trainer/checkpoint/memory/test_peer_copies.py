"""Copies of another node's commits: one of each file, of the current generation only, and where memory suffices."""

from __future__ import annotations

import pytest

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.memory.peer_connection import PeerError
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies, RefusedError
from spotune_trainer.checkpoint.memory.segment import Label, Segment

SIZE = 10_000


def label(step: int, rank: int = 0, size: int = SIZE) -> Label:
    return Label(f"step-{step}", f"rank-{rank}", size, "ab")


def keep(copies: PeerCopies, kept: Label, generation: int = 1, files: tuple[str, ...] = ()) -> list[Segment]:
    """Keep a file; returns the segment that it was received into."""
    filled: list[Segment] = []
    copies.keep(generation, kept, files or (kept.file,), filled.append)
    return filled


@pytest.fixture
def copies() -> PeerCopies:
    made = PeerCopies(machine_memory_bytes)
    made.begin(1, None)
    return made


def test_next_commit_of_a_file_takes_the_memory_of_the_last_one(copies: PeerCopies) -> None:
    assert keep(copies, label(5)) == keep(copies, label(10))
    assert copies.find(label(10)) is not None
    assert copies.find(label(5)) is None


def test_files_that_are_no_longer_sent_are_freed(copies: PeerCopies) -> None:
    (first,) = keep(copies, label(5, rank=0))
    keep(copies, label(10, rank=1))
    assert first.content_bytes == 0


def test_all_files_of_a_commit_stay(copies: PeerCopies) -> None:
    for rank in (0, 1):
        keep(copies, label(5, rank), files=("rank-0", "rank-1"))
    assert all(copies.find(label(5, rank)) for rank in (0, 1))


@pytest.mark.parametrize("generation", [0, 2])
def test_another_generation_is_refused(copies: PeerCopies, generation: int) -> None:
    with pytest.raises(RefusedError, match=f"generation {generation} is not the current one, 1"):
        keep(copies, label(5), generation)


def test_copy_that_is_complete_after_its_generation_has_ended_is_dropped(copies: PeerCopies) -> None:
    filled: list[Segment] = []

    def receive(segment: Segment) -> None:
        filled.append(segment)
        copies.begin(2, "step-5")

    with pytest.raises(RefusedError, match="generation 1 has ended"):
        copies.keep(1, label(5), ("rank-0",), receive)
    assert copies.find(label(5)) is None
    assert filled[0].content_bytes == 0


def test_copy_that_is_cut_off_is_dropped(copies: PeerCopies) -> None:
    keep(copies, label(5))

    def cut(segment: Segment) -> None:
        raise PeerError("cut")

    with pytest.raises(PeerError):
        copies.keep(1, label(10), ("rank-0",), cut)
    assert copies.find(label(10)) is None
    assert copies.find(label(5)) is None, "its memory was overwritten"


def test_next_generation_keeps_only_what_it_starts_from(copies: PeerCopies) -> None:
    files = ("rank-0", "rank-1")
    (old,) = keep(copies, label(5, rank=0), files=files)
    (new,) = keep(copies, label(10, rank=1), files=files)
    assert copies.begin(2, "step-10") == (new,)
    assert old.content_bytes == 0
    assert copies.begin(3, None) == ()
    assert new.content_bytes == 0


def test_copy_is_refused_where_memory_is_short_and_older_ones_are_freed() -> None:
    free = machine_memory_bytes()
    copies = PeerCopies(lambda: free)
    copies.begin(1, None)
    files = ("rank-0", "rank-1")
    kept = [keep(copies, label(5, rank), files=files)[0] for rank in (0, 1)]
    free = machine_memory_bytes() // 10
    with pytest.raises(RefusedError, match=r"a copy of rank-0 needs 0\.0 GB, .* GB are free"):
        keep(copies, label(10, size=10 * SIZE), files=files)
    assert [segment.content_bytes for segment in kept] == [0, 0]


def test_all_memory_is_given_back(copies: PeerCopies) -> None:
    (segment,) = keep(copies, label(5))
    copies.free()
    assert segment.content_bytes == 0
    with pytest.raises(RefusedError):
        keep(copies, label(10))
