"""80 schedules of faults, each a pure function of its seed.

51 to 60 train on a mixture, 61 to 70 on pairs by DPO, 71 to 80 on texts with labels.

A schedule starts a run with some world size and ZeRO stage, and injects three or four faults: a kill, a termination
notice, a lost node or an added node. A fault hits at a step, or while the run starts, saves, restores or exports. It
may change the world size. Odd seeds change it; even seeds keep it and must end with bit-identical weights.

The seed's number selects the required combinations (kill and injection point, world size before and after), so that
all of them are covered. The rest is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, permutations, product

from tests.trainer.support.runs import STEPS_PER_EPOCH

EPOCHS = 18
STEPS = EPOCHS * STEPS_PER_EPOCH
FIRST_MIXTURE_SEED = 51
FIRST_PAIRS_SEED = 61
FIRST_LABELS_SEED = 71
WORLD_SIZES = (1, 2, 3, 4)
ZERO_STAGES = (0, 1, 2, 3)
COMMIT_EVERY = 4
COMPARED_STEPS = 10
"""Number of steps after a change of world size whose losses are compared with those of the old world size."""
_FIRST_STEP = (5, 10)
_STEPS_BETWEEN = (22, 26)
_LONGEST_DELAY_SECONDS = 0.15
_ELASTIC_EVERY = 10


class Data(StrEnum):
    """What a run trains on."""

    ROWS = "rows"
    MIXTURE = "a mixture"
    PAIRS = "pairs"
    LABELS = "labels"


class FaultKind(StrEnum):
    """What a fault does to a run."""

    KILL_WORKER = "one worker killed"
    KILL_WORKERS = "all workers killed"
    KILL_DRIVER = "driver killed"
    KILL_SUPERVISOR = "supervisor killed"
    KILL_RAY = "Ray's head killed"
    KILL_EVERYTHING = "everything killed"
    NOTICE = "termination notice"
    GROW = "node added"
    LOSE_NODE = "node killed"

    @property
    def ends_group(self) -> bool:
        """Whether this fault ends the worker group, or does so if agents are killed with the driver (see injector)."""
        return self is not FaultKind.KILL_SUPERVISOR


class InjectionPoint(StrEnum):
    """The point of a run at which a fault is injected."""

    STEP = "at a step"
    START = "during start"
    SAVE = "during save"
    RESTORE = "during restore"
    EXPORT = "during export"


KILLS = tuple(kind for kind in FaultKind if kind.name.startswith("KILL_"))
KILLS_AND_POINTS = tuple(product(KILLS, InjectionPoint))
CHANGES = tuple(permutations(WORLD_SIZES, 2))


@dataclass(frozen=True)
class Fault:
    """One fault at one injection point.

    Attributes:
        after_step: earliest step; 0 if the fault directly follows the previous one.
        world_size: workers from this fault on.
        victim: selects the worker, as a fraction of all workers in [0, 1).
        delay: seconds between reaching the injection point and the fault.
    """

    kind: FaultKind
    point: InjectionPoint
    after_step: int
    world_size: int
    victim: float
    delay: float


@dataclass(frozen=True)
class Schedule:
    """The faults of one run, in order."""

    seed: int
    world_size: int
    zero_stage: int
    faults: tuple[Fault, ...]

    @property
    def data(self) -> Data:
        """What the job trains on."""
        first_seeds = {Data.MIXTURE: FIRST_MIXTURE_SEED, Data.PAIRS: FIRST_PAIRS_SEED, Data.LABELS: FIRST_LABELS_SEED}
        found = [data for data, first_seed in first_seeds.items() if self.seed >= first_seed]
        return found[-1] if found else Data.ROWS

    @property
    def world_sizes(self) -> list[int]:
        """The world sizes in order of use, without consecutive duplicates."""
        sizes = [self.world_size]
        for fault in self.faults:
            if fault.world_size != sizes[-1]:
                sizes.append(fault.world_size)
        return sizes

    @property
    def changes(self) -> list[tuple[int, int]]:
        """World sizes before and after each change."""
        return list(pairwise(self.world_sizes))


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed; seeds start at 1."""
    draw = random.Random(seed)
    elastic = seed % _ELASTIC_EVERY == 1
    if elastic:
        sizes = _elastic_sizes(seed, draw)
    elif seed % 2:
        sizes = _changing_sizes(seed, draw)
    else:
        sizes = [WORLD_SIZES[seed // 2 % len(WORLD_SIZES)]]
    kill, point = KILLS_AND_POINTS[seed % len(KILLS_AND_POINTS)]
    drawer = _FaultDrawer(draw, kill, point, sizes)
    return Schedule(seed, sizes[0], draw.choice(ZERO_STAGES), tuple(drawer.all(elastic=elastic)))


def _changing_sizes(seed: int, draw: random.Random) -> list[int]:
    """One change that the seed selects, one that is drawn, and perhaps a third."""
    sizes = list(CHANGES[seed // 2 % len(CHANGES)])
    sizes.append(draw.choice([size for size in WORLD_SIZES if size != sizes[-1]]))
    sizes.append(draw.choice(WORLD_SIZES))
    return sizes


def _elastic_sizes(seed: int, draw: random.Random) -> list[int]:
    """A larger world size, the first one again, then any."""
    few = 1 + seed // _ELASTIC_EVERY % 3
    return [few, draw.randint(few + 1, 4), few, draw.choice(WORLD_SIZES)]


class _FaultDrawer:
    """Draws the faults of one schedule; one of them is the required kill at the required injection point.

    Args:
        draw: random generator.
        kill: the required kill.
        point: its injection point.
        sizes: world sizes in order of use; the last one is kept.
    """

    def __init__(self, draw: random.Random, kill: FaultKind, point: InjectionPoint, sizes: list[int]) -> None:
        self._draw = draw
        self._kill = kill
        self._point = point
        self._size = sizes[0]
        self._next_sizes = iter(sizes[1:])

    def all(self, *, elastic: bool) -> Iterator[Fault]:
        """Yield three rounds of one or two faults; one round holds the required kill.

        Args:
            elastic: a node joins in the first round, and is lost in the second.
        """
        last = elastic or self._point is InjectionPoint.EXPORT
        special = 2 if last else self._draw.randrange(3)
        if self._point is InjectionPoint.START and special == 0:
            yield self._fault(self._kill, InjectionPoint.START, 0)
            special = -1
        for number, step in enumerate(self._steps()):
            if number == special:
                yield from self._required(step)
            elif elastic:
                yield self._fault((FaultKind.GROW, FaultKind.LOSE_NODE)[number], InjectionPoint.STEP, step)
            else:
                yield self._drawn(step, (*KILLS, FaultKind.NOTICE))

    def _required(self, step: int) -> Iterator[Fault]:
        if self._point in (InjectionPoint.START, InjectionPoint.RESTORE):
            yield self._drawn(step, (*(kill for kill in KILLS if kill.ends_group), FaultKind.NOTICE))
        after_step = {InjectionPoint.STEP: step, InjectionPoint.SAVE: step, InjectionPoint.EXPORT: STEPS}.get(
            self._point, 0
        )
        yield self._fault(self._kill, self._point, after_step)

    def _drawn(self, step: int, kinds: Sequence[FaultKind]) -> Fault:
        point = self._draw.choice((InjectionPoint.STEP, InjectionPoint.STEP, InjectionPoint.SAVE))
        return self._fault(self._draw.choice(kinds), point, step)

    def _steps(self) -> list[int]:
        steps = [self._draw.randint(*_FIRST_STEP)]
        for _ in range(2):
            steps.append(steps[-1] + self._draw.randint(*_STEPS_BETWEEN))
        return steps

    def _fault(self, kind: FaultKind, point: InjectionPoint, after_step: int) -> Fault:
        if kind.ends_group and point in (InjectionPoint.STEP, InjectionPoint.SAVE):
            self._size = next(self._next_sizes, self._size)
        delay = round(self._draw.uniform(0, _LONGEST_DELAY_SECONDS), 3)
        return Fault(kind, point, after_step, self._size, round(self._draw.random(), 3), delay)
