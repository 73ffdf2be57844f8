"""A worker whose loss is not finite in some steps."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.training.worker import Worker

OVERFLOWING_STEPS = (3, 4)


class OverflowingWorker(Worker):
    """In the steps OVERFLOWING_STEPS the last rank's logits are infinite."""

    def set_up(self) -> None:
        super().set_up()
        self.overflows = False
        self.context.engine.module.register_forward_hook(self._overflow)

    def commit(self, step: int) -> None:
        """Wait for each commit, so that no later one is skipped while it is being written."""
        super().commit(step)
        self.checkpointing.finish_commit()

    def _overflow(self, _module: object, _inputs: object, output: Any) -> Any:
        if self.overflows:
            output.logits = output.logits * math.inf
        return output

    def batches(self) -> Generator[MicroBatches]:
        for step, batches in enumerate(super().batches(), start=self.context.first_step + 1):
            self.overflows = step in OVERFLOWING_STEPS and self.rank == self.world_size - 1
            yield batches
