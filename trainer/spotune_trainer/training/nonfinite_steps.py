"""Steps with a non-finite loss or gradient ("bad steps"): they change no weights, and too many in a row end the run.

All ranks detect a bad step by the norm of the reduced gradient, which they have before the optimizer step. A loss can
be non-finite although its gradient is finite; `nan_unless_finite` then makes the gradient NaN, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from spotune.errors import JobError

_REMEDY = "lower training.learningRate, set training.maxGradNorm, or try model.dtype float32 in case it overflowed"


def nan_unless_finite(loss: Tensor, weight: float) -> Tensor:
    """`weight` if `loss` (a scalar) is finite, else NaN; computed on the device.

    The loss is multiplied by it before backward, so a non-finite loss always gives a NaN gradient.
    """
    return weight + 0.0 * loss.detach()


class BadSteps:
    """Counts bad steps; the same on all ranks.

    Args:
        limit: `training.maxBadSteps`: how many in a row are skipped before the run fails.
        loss_is_scaled: whether the loss is scaled up, as in float16. The gradient of a finite loss may then overflow.
            Such a step is skipped, but does not count as bad: the next one has a smaller scale.

    Attributes:
        in_a_row: bad steps since the last good one.
        total: all skipped steps of the run.
    """

    def __init__(self, limit: int, *, loss_is_scaled: bool = False) -> None:
        self._limit = limit
        self._loss_is_scaled = loss_is_scaled
        self.in_a_row = 0
        self.total = 0

    def restore(self, in_a_row: int, total: int) -> None:
        """Set both counts to those of a checkpoint."""
        self.in_a_row, self.total = in_a_row, total

    def record(self, step: int, loss: float, grad_norm: float | None, samples: Callable[[], str]) -> bool:
        """Count a step. Returns whether it was skipped: whether it changed no weights.

        Args:
            step: optimizer steps done after it.
            loss: its mean loss per label token.
            grad_norm: its gradient's norm before clipping.
            samples: returns its sample ids for the message; called only if the run fails.

        Raises:
            JobError: more than `limit` steps in a row are bad.
        """
        if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
            self.in_a_row = 0
            return False
        self.total += 1
        if self._loss_is_scaled and math.isfinite(loss):
            return True
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            problem = f"the loss of step {step} is {loss}"
            if math.isfinite(loss):
                problem = f"the gradient of step {step} is not finite"
            skipped = f", after {self._limit} such steps in a row that were skipped" if self._limit else ""
            raise JobError(f"training: {problem} (samples {samples()}){skipped}: {_REMEDY}")
        return True
