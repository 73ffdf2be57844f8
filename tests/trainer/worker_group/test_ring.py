"""The ring of nodes: each copies its commits to the next one, and reads from all others."""

from __future__ import annotations

import pytest

from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.worker_group.node_state import NodeAddresses, OtherNodes

A, B, C, IDLE = (PeerAddress(f"10.0.0.{number}", 4000) for number in range(4))


def others_of(hosts: list[PeerAddress | None], *idle: PeerAddress | None) -> list[OtherNodes]:
    """The other nodes for each node of a group."""
    addresses = NodeAddresses(tuple(hosts), idle)
    return [addresses.others_of(node) for node in range(len(hosts))]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([], []),
        ([A], [OtherNodes((), None)]),
        ([A, B], [OtherNodes((B,), B), OtherNodes((A,), A)]),
        ([A, B, C], [OtherNodes((B, C), B), OtherNodes((C, A), C), OtherNodes((A, B), A)]),
    ],
    ids=["none", "one", "two", "three"],
)
def test_each_node_has_the_next_one_and_reads_from_all(
    hosts: list[PeerAddress | None], expected: list[OtherNodes]
) -> None:
    assert others_of(hosts) == expected


def test_nodes_without_ranks_are_read_last_and_get_no_copies() -> None:
    assert others_of([A, B], IDLE) == [OtherNodes((B, IDLE), B), OtherNodes((A, IDLE), A)]
    assert others_of([A], IDLE) == [OtherNodes((IDLE,), None)]


def test_node_that_cannot_be_reached_is_left_out_of_the_ring_and_reads_from_the_others() -> None:
    assert others_of([A, None, C], None) == [OtherNodes((C,), C), OtherNodes((C, A), None), OtherNodes((A,), A)]
