"""A step that has been launched, but whose results the host does not have yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step.

    Attributes:
        tokens: that go through the model, without padding (`Batch.tokens`); rates count these.
        labels: tokens that carry loss.
        losses: what each of the objective's losses is the mean over; see `Objective.counts`.
    """

    tokens: int
    labels: int
    losses: tuple[int, ...]


class HostCopy:
    """A copy of a tensor in host memory, for which the host waits only when it reads.

    Args:
        tensor: on the device. The copy follows what was launched so far.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def read(self) -> Any:
        """The values as a number or as nested lists."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.tolist()


@dataclass
class PendingStep:
    """A step that is done, but whose results the ranks have not added up yet; this rank's share of them.

    Attributes:
        step: optimizer steps done after it.
        learning_rate: of the step.
        counts: of the step, over all ranks.
        samples: samples of the step, over all ranks.
        sums: over the rows of each micro-batch: the losses, then the statistics of the objective, fp64,
            ``[micro-batch, losses + statistics]``, zero for those of other ranks.
        grad_norm: norm of the gradient before clipping, the same on all ranks; None if it is not computed.
        row_hash: combined hash of the rows that went through backward.
        flops: floating-point operations of this rank's rows, by the MFU formula (`models/flops.py`).
        seconds: wall time of the step.
        productive_seconds: the part of `seconds` that went into the step itself.
        data_wait_seconds: the part of `seconds` that was spent waiting for data.
        own_seconds: of this rank, without waits for other ranks (`observability/own_time.py`).
    """

    step: int
    learning_rate: float
    counts: StepCounts
    samples: int
    sums: HostCopy
    grad_norm: HostCopy | None
    row_hash: int
    flops: float
    seconds: float = 0.0
    productive_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    own_seconds: float = 0.0
