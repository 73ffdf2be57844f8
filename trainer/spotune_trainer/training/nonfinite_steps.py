"""Steps whose loss or gradient is not finite: no weights come of them, they are counted, and too many end the run.

That a step is bad shows in the norm of its reduced gradient, which all ranks know before they update: a loss that is
not finite is made to spoil the gradient (`spoiled_by`), whatever its own derivative is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from spotune.errors import JobError

_REMEDY = "lower training.learningRate, set training.maxGradNorm, or try model.dtype float32 in case it overflowed"


def spoiled_by(loss: Tensor, weight: float) -> Tensor:
    """`weight`, or NaN where `loss` (a scalar) is not finite: a factor that leaves no finite gradient of a bad loss."""
    return weight + 0.0 * loss.detach()


class BadSteps:
    """Counts bad steps; the same on all ranks.

    Args:
        limit: `training.maxBadSteps`: so many in a row are passed over.
        loss_is_scaled: whether the gradient of a finite loss may overflow since the loss is scaled up, as in float16.
            Such a step changes no weights either, but it is no bad one: the next has a smaller scale.

    Attributes:
        in_a_row: bad steps since the last good one.
        total: all steps of the run that changed no weights.
    """

    def __init__(self, limit: int, *, loss_is_scaled: bool = False) -> None:
        self._limit = limit
        self._loss_is_scaled = loss_is_scaled
        self.in_a_row = 0
        self.total = 0

    def restore(self, in_a_row: int, total: int) -> None:
        """Go on from what a checkpoint says."""
        self.in_a_row, self.total = in_a_row, total

    def take_in(self, step: int, loss: float, grad_norm: float | None, samples: Callable[[], str]) -> bool:
        """Whether the step changed no weights.

        Args:
            step: optimizer steps done after it.
            loss: its mean loss per token.
            grad_norm: its gradient's norm before clipping.
            samples: its sample ids, for people; asked for only where the run ends.

        Raises:
            JobError: it is one bad step in a row too many.
        """
        if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
            self.in_a_row = 0
            return False
        self.total += 1
        if self._loss_is_scaled and math.isfinite(loss):
            return True
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            what = f"the loss of step {step} is {loss}"
            if math.isfinite(loss):
                what = f"the gradient of step {step} is not finite"
            passed_over = f", after {self._limit} such steps in a row that were skipped" if self._limit else ""
            raise JobError(f"training: {what} (samples {samples()}){passed_over}: {_REMEDY}")
        return True
