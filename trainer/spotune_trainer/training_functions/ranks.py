"""The ranks of a worker group that calls a training function: exchange of small objects on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from spotune_trainer.observability.repeating import repeating

T = TypeVar("T")

_BEAT_SECONDS = 5.0


class Call(Enum):
    """What the ranks do together. The value is for their agreement."""

    REPORT = 0
    SAVE = 1
    RETURN = 2

    def describe(self, step: int) -> str:
        """For a message, with the step of the call."""
        return {Call.REPORT: f"reported step {step}", Call.SAVE: f"saved step {step}", Call.RETURN: "returned"}[self]


@dataclass(frozen=True)
class Maxima:
    """The largest values of all ranks, which are exchanged in the background.

    Attributes:
        values: fp64 ``[values]``; complete after `work`.
        work: of the exchange; None if there is one rank.
    """

    values: torch.Tensor
    work: Any

    def wait(self) -> list[float]:
        """The values, once all ranks have given theirs."""
        if self.work is not None:
            self.work.wait()
        found: list[float] = self.values.tolist()
        return found


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

    def begin_maxima(self, values: Sequence[float]) -> Maxima:
        """Begin to find the largest value of all ranks at each position. All ranks call it together."""
        largest, work = torch.tensor(values, dtype=torch.float64), None
        if self.world_size > 1:
            work = distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)
        return Maxima(largest, work)

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
