"""200 schedules of kills around recoveries, each a pure function of its seed.

A schedule starts a run on one, two or three nodes and has one or two rounds. A round is a first loss, and one or two
kills while the run recovers from it. The seed's number selects what must be covered: kills during a recovery, kills
during the copy of a commit to another node, the loss of both holders of a file, and kills while a rank reads from
another node. The rest is drawn at random.

In most schedules a group has always the same world size. In the others it shrinks and grows with the nodes, and the job
asks for the same bits at any world size (`execution.reproducible: worldSize`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Literal

from tests.trainer.support.runs import STEPS_PER_EPOCH

FIRST_SEED, LAST_SEED = 101, 300
EPOCHS = 6
STEPS = EPOCHS * STEPS_PER_EPOCH
COMMIT_EVERY = 5
MOST_WORKERS = 3
_FIRST_STEP, _SECOND_STEP = (6, 10), (16, 21)
_LONGEST_DELAY_SECONDS = 0.08


class Target(StrEnum):
    """What is killed."""

    RANK = "a rank"
    RANKS = "all ranks"
    NODE = "a node"
    HOLDERS = "both holders of a file"
    SENDER = "the node that sends"
    RECEIVER = "the node that receives"
    READER = "the rank that reads"
    DRIVER = "the driver"
    EVERYTHING = "everything"


class Moment(StrEnum):
    """When."""

    STEP = "at a step"
    SAVE = "during a commit"
    COPY = "during the copy to a peer"
    COPIED = "once the last commit is copied"
    FORMING = "while the group forms"
    LOADING = "while it loads the model"
    RESTORING = "while it restores"
    PEER_READ = "while it reads from a peer"
    RESTORED = "before its first step"

    @property
    def is_recovery(self) -> bool:
        """Whether a worker group is at this moment before its first step."""
        return self in RECOVERY_MOMENTS


RECOVERY_MOMENTS = (Moment.FORMING, Moment.LOADING, Moment.RESTORING, Moment.PEER_READ, Moment.RESTORED)
_BY_PHASE = tuple(moment for moment in RECOVERY_MOMENTS if moment is not Moment.PEER_READ)
_DURING_RECOVERY = tuple(
    product((Target.RANK, Target.RANKS, Target.NODE, Target.DRIVER, Target.RANK, Target.EVERYTHING), _BY_PHASE)
)
_DURING_COPY = (Target.SENDER, Target.RECEIVER, Target.DRIVER, Target.HOLDERS)
_DURING_PEER_READ = (Target.SENDER, Target.READER, Target.DRIVER)


@dataclass(frozen=True)
class Kill:
    """One kill at one moment.

    Attributes:
        after_step: earliest step; 0 in a recovery.
        victim: selects the rank or node, as a fraction of all of them in [0, 1).
        delay: seconds between the moment and the kill.
    """

    target: Target
    moment: Moment
    after_step: int
    victim: float
    delay: float


@dataclass(frozen=True)
class RecoverySchedule:
    """A job, its nodes, and the kills in order.

    Attributes:
        nodes: slots of each node, the one with Ray's head first.
        memory_copies: `checkpoint.memoryCopies`.
        resizes: whether the world size changes with the nodes.
        rounds: the kills of each loss and the recovery from it.
    """

    seed: int
    nodes: tuple[int, ...]
    zero_stage: int
    memory_copies: Literal[1, 2]
    resizes: bool
    rounds: tuple[tuple[Kill, ...], ...]

    @property
    def world_size(self) -> int:
        """Workers with all nodes."""
        return sum(self.nodes)

    @property
    def kills(self) -> list[Kill]:
        """All kills in order."""
        return [kill for kills in self.rounds for kill in kills]


class Theme(StrEnum):
    """What a schedule must contain; the seed's number selects it."""

    RECOVERY = "kills during recovery"
    COPY = "a kill during the copy"
    HOLDERS = "both holders lost"
    PEER_READ = "a kill during a read from a peer"


def theme_of(seed: int) -> Theme:
    """The theme of a schedule."""
    return tuple(Theme)[seed % 4]


def make_schedule(seed: int, most_workers: int = MOST_WORKERS) -> RecoverySchedule:
    """Return the schedule of a seed.

    Args:
        seed: of the schedule.
        most_workers: workers that the machine has room for, at least 1. With fewer than two there is no other node.
    """
    draw = random.Random(seed)
    number = seed // 4
    nodes = _nodes(theme_of(seed), number, most_workers)
    resizes = len(nodes) > 1 and number % 5 == 1
    zero_stage = draw.choice((0, 1, 2) if resizes else (0, 1, 2, 3))
    memory_copies: Literal[1, 2] = 1 if draw.random() < 0.2 else 2
    drawer = _KillDrawer(draw, len(nodes))
    rounds = [tuple(drawer.round(theme_of(seed), number, draw.randint(*_FIRST_STEP)))]
    if seed % 3 == 0:
        other = draw.choice(tuple(Theme))
        rounds.append(tuple(drawer.round(other, draw.randrange(24), draw.randint(*_SECOND_STEP))))
    return RecoverySchedule(seed, nodes, zero_stage, memory_copies, resizes, tuple(rounds))


def _nodes(theme: Theme, number: int, most_workers: int) -> tuple[int, ...]:
    """One node for a part of the kills during recovery, else two or, for every third schedule, three."""
    if most_workers == 1:
        return (1,)
    if theme is Theme.RECOVERY:
        return (2,) if number % 2 else (1, 1)
    return (1, 1, 1) if number % 3 == 0 and most_workers > 2 else (1, 1)


class _KillDrawer:
    """Draws the kills of a schedule.

    Args:
        draw: random generator.
        nodes: number of nodes.
    """

    def __init__(self, draw: random.Random, nodes: int) -> None:
        self._draw = draw
        self._nodes = nodes

    def round(self, theme: Theme, number: int, step: int) -> Iterator[Kill]:
        """Yield a first loss and the kills during the recovery from it; a single node has no peers to copy to."""
        match theme if self._nodes > 1 else Theme.RECOVERY:
            case Theme.RECOVERY:
                first = self._draw.choice((Target.RANK, Target.RANKS, Target.NODE))
                yield self._kill(first, self._draw.choice((Moment.STEP, Moment.SAVE)), step)
                yield self._kill(*_DURING_RECOVERY[number % len(_DURING_RECOVERY)])
                if self._draw.random() < 0.25:
                    yield self._in_recovery()
            case Theme.COPY:
                yield self._kill(_DURING_COPY[number % len(_DURING_COPY)], Moment.COPY, step)
                yield self._in_recovery()
            case Theme.HOLDERS:
                yield self._kill(Target.HOLDERS, self._draw.choice((Moment.COPIED, Moment.STEP)), step)
                yield self._in_recovery()
            case Theme.PEER_READ:
                yield self._kill(Target.NODE, Moment.COPIED, step)
                yield self._kill(_DURING_PEER_READ[(number + number // 3) % 3], Moment.PEER_READ)

    def _in_recovery(self) -> Kill:
        targets = (Target.RANK, Target.RANKS, Target.NODE, Target.DRIVER, Target.DRIVER)
        return self._kill(self._draw.choice(targets), self._draw.choice(_BY_PHASE))

    def _kill(self, target: Target, moment: Moment, after_step: int = 0) -> Kill:
        longest = 0.0 if moment is Moment.COPIED else _LONGEST_DELAY_SECONDS  # or another commit is complete by then
        delay = round(self._draw.uniform(0, longest), 3)
        return Kill(target, moment, after_step, round(self._draw.random(), 3), delay)
