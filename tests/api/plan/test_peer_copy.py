"""Memory for commits of another node: kept where it fits, refused where it was asked for and does not."""

import math
from dataclasses import replace
from typing import Literal

import pytest

from spotune.errors import JobError
from spotune.plan.layout import LayoutRequest, choose_layout
from spotune.plan.memory import FLOAT32, GB
from tests.api.plan.test_layout import T5_SMALL, setup_for


def test_a_commit_of_another_node_is_kept_where_it_fits_beside_ones_own() -> None:
    setup = replace(setup_for("google-t5/t5-small", precision=FLOAT32), on_cpu=True)
    auto = LayoutRequest(memory_copies="auto", peer_copy="auto")
    without = choose_layout(setup, 2, 40 * GB, replace(auto, peer_copy=False))
    enough = choose_layout(setup, 2, 40 * GB, auto)

    assert (enough.layout, enough.memory_copies, enough.peer_copy) == (without.layout, 2, True)
    assert not without.peer_copy
    one = choose_layout(setup, 2, 40 * GB)
    assert enough.memory.total_bytes - without.memory.total_bytes == one.memory.commit_bytes
    layout = one.layout
    complete = LayoutRequest(layout.zero_stage, layout.micro_batch_size, layout.gradient_checkpointing, "auto", "auto")
    needed = math.ceil(enough.memory.total_bytes / setup.usable_fraction)
    assert choose_layout(setup, 2, needed + 1, complete).peer_copy
    short = choose_layout(setup, 2, needed - 100, complete)
    assert (short.memory_copies, short.peer_copy) == (2, False)
    shorter = choose_layout(setup, 2, math.ceil(without.memory.total_bytes / setup.usable_fraction) - 100, complete)
    assert (shorter.memory_copies, shorter.peer_copy) == (1, False)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_peer_copy_keeps_the_number_of_commits_that_was_asked_for(copies: Literal[1, 2]) -> None:
    choice = choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(memory_copies=copies, peer_copy="auto"))
    once = choose_layout(T5_SMALL, 2, 80 * GB)

    assert (choice.memory_copies, choice.peer_copy) == (copies, True)
    assert choice.memory.commit_bytes == (copies + 1) * once.memory.commit_bytes


def test_a_peer_copy_that_was_asked_for_counts_in_the_layout_or_is_refused() -> None:
    setup = replace(setup_for("google-t5/t5-small", precision=FLOAT32), on_cpu=True)
    asked = LayoutRequest(peer_copy=True)
    least = choose_layout(setup, 1, 40 * GB, LayoutRequest(micro_batch_size=1, gradient_checkpointing=True))
    budget = int(least.memory.total_bytes / setup.usable_fraction) + GB // 100

    choice = choose_layout(setup, 1, 40 * GB, asked)
    assert (choice.memory_copies, choice.peer_copy) == (1, True)
    with pytest.raises(JobError, match=r"checkpoint\.peerCopy auto"):
        choose_layout(setup, 1, budget, asked)


def test_nothing_is_copied_to_another_node_without_commits_in_memory() -> None:
    assert not choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(memory_copies=0, peer_copy="auto")).peer_copy
