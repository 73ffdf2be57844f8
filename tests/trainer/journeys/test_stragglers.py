"""Two real ranks, one of which is slow: it is named, wherever it loses its time."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.observability import stragglers
from spotune_trainer.observability.stragglers import StragglerMeter
from spotune_trainer.training.worker import Worker
from tests.trainer.support.runs import Layout, Runs, train_generation

pytestmark = pytest.mark.slow

SLOWED_SECONDS = 0.1
"""At each micro-batch, of which each rank has three in a step."""


class OneBlock(Worker):
    """Names a rank after twenty steps, however short: one block, as a busy machine may hold up a rank in some steps."""

    def set_up(self) -> None:
        super().set_up()
        stragglers.BLOCKS = 1  # type: ignore[misc]
        self.loop.stragglers = StragglerMeter(["a", "b"], block_seconds=0.0, block_steps=20)


class SlowData(OneBlock):
    """Rank 1 waits for its data."""

    def batches(self) -> Generator[MicroBatches]:
        for each in super().batches():
            if self.rank == 1:
                time.sleep(3 * SLOWED_SECONDS)
            yield each


class SlowBackward(OneBlock):
    """Rank 1 is slow in its backward pass, in which gradients are reduced."""

    def set_up(self) -> None:
        super().set_up()
        if self.rank == 1:
            first = next(iter(self.context.engine.module.parameters()))
            first.register_hook(lambda _: time.sleep(SLOWED_SECONDS))


@pytest.mark.parametrize(
    ("worker", "stage"), [(SlowData, 1), pytest.param(SlowBackward, 2, marks=pytest.mark.long), (SlowBackward, 3)]
)
def test_slow_rank_is_named_and_the_one_that_waits_for_it_is_not(runs: Runs, worker: type[Worker], stage: int) -> None:
    directory, job = runs.empty("stragglers"), runs.job(training={"epochs": 5})
    train_generation(directory, job, Layout(2, stage), worker)
    logs = directory.generation_logs(1)
    progress: dict[str, Any] = files.read_json(logs.progress) or {}
    own = progress["ownSeconds"]
    assert own[1] >= SLOWED_SECONDS
    assert own[0] < own[1] - SLOWED_SECONDS * 0.7, "what it waits for is not its own time"
    assert [(each["rank"], each["node"]) for each in progress["stragglers"]] == [(1, "b")]
    events = [each for each in files.read_lines(logs.events) if each["event"] == "straggler"]
    assert [(each["rank"], each["node"]) for each in events] == [(1, "b")]
    assert events[0]["ratio"] > 1.2
