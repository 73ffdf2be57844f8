"""A worker group that restores from shared memory ends with the bits of one that was never interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spotune_trainer import files
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import (
    STEPS,
    Layout,
    Runs,
    committed,
    committed_state,
    losses,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.slow

BEFORE = Layout(2, 2)
STATE_BYTES = 3 * 4
"""Of each parameter: the master weight and two moments, in fp32."""


def finished_with_memory(runs: Runs, dtype: str = "float32") -> tuple[JobDirectory, NodeMemory]:
    """An undisturbed run, and the memory of its node, which holds its commits of steps 5 and 10."""
    directory, memory = runs.empty("finished-memory"), NodeMemory()
    train_generation(directory, runs.job(dtype=dtype), BEFORE, memory=memory)
    return directory, memory


def interrupted(runs: Runs, run: JobDirectory, *, wiped: bool) -> JobDirectory:
    """A copy of the run as it was after step 5. The files of that commit may be wiped: only memory has it then."""
    directory = runs.interrupted(run, step=5)
    if wiped:
        checkpoint = committed(directory, 5)
        for entry in checkpoint.manifest.files:
            (checkpoint.path / entry.name).write_bytes(bytes(entry.size))
    return directory


def restored(directory: JobDirectory) -> dict[str, Any]:
    """The event of the second generation."""
    events = files.read_lines(directory.generation_logs(2).events)
    return next(event for event in events if event["event"] == "restored")


def differing(first: JobDirectory, second: JobDirectory) -> list[str]:
    """Names of the states of the last commit that differ."""
    found, expected = committed_state(first, STEPS), committed_state(second, STEPS)
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_from_memory_is_bit_identical_to_no_interruption(runs: Runs, dtype: str) -> None:
    undisturbed, memory = finished_with_memory(runs, dtype)
    resumed = interrupted(runs, undisturbed, wiped=True)
    train_generation(resumed, runs.job(dtype=dtype), BEFORE, memory=memory)
    assert committed(resumed, STEPS).name.generation == 2
    assert differing(resumed, undisturbed) == []
    assert losses(resumed) == losses(undisturbed)
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert restored(resumed)["volumeBytes"] == 0
    assert restored(resumed)["memoryBytes"] > 0
    weights = "model.safetensors"
    assert (resumed.export / weights).read_bytes() == (undisturbed.export / weights).read_bytes()


@pytest.mark.parametrize("after", [Layout(1, 0), Layout(3, 3)], ids=str)
def test_another_world_size_gets_the_same_bits_from_memory_as_from_the_volume(runs: Runs, after: Layout) -> None:
    undisturbed, memory = finished_with_memory(runs)
    by_volume = interrupted(runs, undisturbed, wiped=False)
    train_generation(by_volume, runs.job(), after)
    by_memory = interrupted(runs, undisturbed, wiped=True)
    train_generation(by_memory, runs.job(), after, memory=memory)
    assert differing(by_memory, by_volume) == []
    assert losses(by_memory) == losses(by_volume)
    assert restored(by_memory)["volumeBytes"] == restored(by_volume)["memoryBytes"] == 0
    assert restored(by_memory)["memoryBytes"] == restored(by_volume)["volumeBytes"]
