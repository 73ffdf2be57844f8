"""The ranks of a worker group that calls a training function: exchange of small objects on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from spotune_trainer.training_functions.repeating import repeating

T = TypeVar("T")

_BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Ranks:
    """The ranks of a worker group, which exchange small objects on the host.

    A single rank has no need of a process group.

    Attributes:
        rank: of this process, 0-based.
        world_size: number of ranks.
        group: gloo process group of all ranks; None if there is one rank.
        heartbeat: called from time to time while this rank waits for others, which have a watchdog of their own.
        node: number of this rank's node. If a bucket keeps the job, the ranks of a node share a directory.
    """

    rank: int
    world_size: int
    group: Any
    heartbeat: Callable[[], None]
    node: int = 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. All ranks call it together."""
        found: list[T] = [value] * self.world_size
        if self.world_size == 1:
            return found
        with repeating(self.heartbeat, _BEAT_SECONDS, "waiting"):
            distributed.all_gather_object(found, value, group=self.group)
        return found

    def maxima(self, values: Sequence[float]) -> list[float]:
        """The largest value of all ranks at each position. All ranks call it together."""
        largest = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in largest]

    def gather_results(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returns on each rank. All ranks call it together.

        Raises:
            Exception: on all ranks, what `compute` has raised on one of them. So no rank waits for one that has failed.
        """
        value, problem = None, None
        try:
            value = compute()
        except Exception as error:  # noqa: BLE001 - raised by all ranks
            problem = error
        found = self.gather((value, problem))
        problems = [each for _, each in found if each is not None]
        if problems:
            raise problem or problems[0]
        return [cast("T", each) for each, _ in found]
