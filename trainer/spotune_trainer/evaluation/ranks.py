"""The ranks that evaluate together, and how they share batches.

Batch b goes to rank b mod world_size. Ranks that have no batch left repeat one row and discard its result, so all ranks
run the same number of forward passes (with ZeRO-3, each gathers weights from all ranks). Batches do not depend on the
ranks, so their results are the same at any world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
Row = TypeVar("Row")


@dataclass(frozen=True)
class RankGroup:
    """The ranks that evaluate together: this process's rank, the world size, and the group (None: the default one)."""

    rank: int = 0
    world_size: int = 1
    group: distributed.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, ordered by rank. Collective: every rank must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The `value` of rank 0. Collective: every rank must call it."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


def run_batches(run: Callable[[Sequence[Row], int], T], batches: Sequence[Sequence[Row]], ranks: RankGroup) -> list[T]:
    """What `run` returns for each batch and its index, in the order of the batches. Collective."""
    local: list[T] = []
    for index in range(ranks.rank, math.ceil(len(batches) / ranks.world_size) * ranks.world_size, ranks.world_size):
        if index < len(batches):
            local.append(run(batches[index], index))
        else:
            run(batches[-1][-1:], len(batches) - 1)
    of_ranks = ranks.gather(local)
    return [of_ranks[index % len(of_ranks)][index // len(of_ranks)] for index in range(len(batches))]


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode without gradients, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
