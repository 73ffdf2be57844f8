"""Memory for the copy of a commit: without room for shared memory, the process uses its own, and training goes on."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
from typing import Any

import pytest
import torch

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.checkpoint.snapshot import Snapshot
from spotune_trainer.checkpoint.writer import file_header, tensor_sizes
from tests.trainer.support.checkpoints import fragments_of_rank, make_state

_FORKING = multiprocessing.get_context("forkserver")
ENTRY = FileEntry("rank-00000.safetensors", 0, "")


def snapshot_without_room(results: Any) -> None:
    """Take two snapshots in a process whose files, those in memory included, may have a thousand bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spotune.worker").addHandler(handler)
    node = NodeMemory()
    (memory,) = node.share(1, 2, None)
    assert memory is not None
    memory.free_bytes = machine_memory_bytes  # whatever else runs on the machine
    snapshot, equal = Snapshot(memory), []
    for step in (5, 10):
        state = make_state(step)
        snapshot.reserve(fragments_of_rank(state, 1, 0))
        snapshot.take(fragments_of_rank(state, 1, 0))
        copy = {f.parameter: f.states["exp_avg"] for f in snapshot.fragments()}
        equal.append(all(torch.equal(copy[name], state[f"{name}/exp_avg"]) for name in copy))
        snapshot.complete(CheckpointName(step, 1), ENTRY)
        snapshot.reserve_next()
    results.put((equal, messages, sum(segment.allocated_bytes for segment in node._segments())))


@pytest.mark.slow  # it starts the fork server of ranks
def test_without_room_for_a_segment_commits_use_memory_of_the_process() -> None:
    results = _FORKING.Queue()
    process = _FORKING.Process(target=snapshot_without_room, args=(results,))
    process.start()
    equal, messages, allocated = results.get(timeout=120)
    process.join()
    assert equal == [True, True]
    assert allocated == 0
    (message,) = messages
    assert message.startswith("the snapshots of commits are not kept in shared memory: 0.0 GB cannot be allocated")


def test_a_segment_gets_the_bytes_of_the_file() -> None:
    node, state = NodeMemory(), make_state()
    (memory,) = node.share(1, 2, None)
    assert memory is not None
    snapshot, fragments = Snapshot(memory), fragments_of_rank(state, 1, 0)
    snapshot.take(fragments)
    expected = file_header(tensor_sizes(fragments))
    expected += b"".join(each.numpy().tobytes() for fragment in fragments for each in fragment.states.values())
    assert memory.own[0].map()[4096:] == expected
