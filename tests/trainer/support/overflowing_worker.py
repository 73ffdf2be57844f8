"""Training in which the loss of some steps is not finite."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.training.worker import Worker

BAD = (3, 4)


class OverflowingWorker(Worker):
    """Its last rank's model puts out what overflows, in the steps of BAD."""

    def set_up(self) -> None:
        super().set_up()
        self.overflows = False
        self.engine.module.register_forward_hook(self._overflow)

    def commit(self, step: int) -> None:
        """Wait for each commit, so that none is left out because another one is being written."""
        super().commit(step)
        self.finish_commit()

    def _overflow(self, _module: object, _inputs: object, output: Any) -> Any:
        if self.overflows:
            output.logits = output.logits * math.inf
        return output

    def _batches(self) -> Generator[MicroBatches]:
        for step, batches in enumerate(super()._batches(), start=self.first_step + 1):
            self.overflows = step in BAD and self.rank == self.world_size - 1
            yield batches
