"""Fifty schedules of disturbances, each a pure function of its seed.

A schedule starts a run of some world size at some ZeRO stage and disturbs it three or four times: something is killed,
told to leave, taken away or added, at a step or while the run starts, saves, restores or exports, and the world size
may be another one from then on. Odd seeds change it, even seeds keep it and must end with the very same weights.

What must not be left to chance is dealt out by the number of the seed: which kill meets which moment, and which world
size is followed by which. The rest is drawn.
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
WORLD_SIZES = (1, 2, 3, 4)
ZERO_STAGES = (0, 1, 2, 3)
COMMIT_EVERY = 4
COMPARED_STEPS = 10
"""After a change of world size the losses of so many steps are compared with those of the old world size."""
_FIRST_STEP = (5, 10)
_STEPS_BETWEEN = (22, 26)
_LONGEST_DELAY_SECONDS = 0.15
_ELASTIC_EVERY = 10


class Deed(StrEnum):
    """What is done to a run."""

    KILL_WORKER = "one worker killed"
    KILL_WORKERS = "all workers killed"
    KILL_DRIVER = "driver killed"
    KILL_SUPERVISOR = "supervisor killed"
    KILL_RAY = "Ray's head killed"
    KILL_EVERYTHING = "everything killed"
    NOTICE = "told to leave"
    GROW = "node added"
    LOSE_NODE = "node killed"

    @property
    def ends_group(self) -> bool:
        """Whether the worker group ends by it, whatever else does."""
        return self is not Deed.KILL_SUPERVISOR


class Moment(StrEnum):
    """When it is done."""

    STEP = "at a step"
    START = "during start"
    SAVE = "during save"
    RESTORE = "during restore"
    EXPORT = "during export"


KILLS = tuple(deed for deed in Deed if deed.name.startswith("KILL_"))
KILLS_AND_MOMENTS = tuple(product(KILLS, Moment))
CHANGES = tuple(permutations(WORLD_SIZES, 2))


@dataclass(frozen=True)
class Disturbance:
    """One deed at one moment.

    Attributes:
        after_step: it waits for the moment from this step on; 0 where it follows at the heels of the one before.
        world_size: workers from then on.
        victim: which worker, as a part of all of them in [0, 1).
        delay: seconds from when the moment is seen to the deed.
    """

    deed: Deed
    moment: Moment
    after_step: int
    world_size: int
    victim: float
    delay: float


@dataclass(frozen=True)
class Schedule:
    """What happens to one run, in order."""

    seed: int
    world_size: int
    zero_stage: int
    disturbances: tuple[Disturbance, ...]

    @property
    def world_sizes(self) -> list[int]:
        """From the first to the last, each as often as it is taken up."""
        sizes = [self.world_size]
        for disturbance in self.disturbances:
            if disturbance.world_size != sizes[-1]:
                sizes.append(disturbance.world_size)
        return sizes

    @property
    def changes(self) -> list[tuple[int, int]]:
        """World sizes before and after each change."""
        return list(pairwise(self.world_sizes))


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed, counted from 1."""
    draw = random.Random(seed)
    elastic = seed % _ELASTIC_EVERY == 1
    if elastic:
        sizes = _elastic_sizes(seed, draw)
    elif seed % 2:
        sizes = _changing_sizes(seed, draw)
    else:
        sizes = [WORLD_SIZES[seed // 2 % len(WORLD_SIZES)]]
    kill, moment = KILLS_AND_MOMENTS[seed % len(KILLS_AND_MOMENTS)]
    acts = _Acts(draw, kill, moment, sizes)
    return Schedule(seed, sizes[0], draw.choice(ZERO_STAGES), tuple(acts.all(elastic=elastic)))


def _changing_sizes(seed: int, draw: random.Random) -> list[int]:
    """A change that is dealt out, another that is drawn, and perhaps a third."""
    sizes = list(CHANGES[seed // 2 % len(CHANGES)])
    sizes.append(draw.choice([size for size in WORLD_SIZES if size != sizes[-1]]))
    sizes.append(draw.choice(WORLD_SIZES))
    return sizes


def _elastic_sizes(seed: int, draw: random.Random) -> list[int]:
    """More, and then as few as before; then any."""
    few = 1 + seed // _ELASTIC_EVERY % 3
    return [few, draw.randint(few + 1, 4), few, draw.choice(WORLD_SIZES)]


class _Acts:
    """Draws the acts of one schedule around the kill and the moment that were dealt to it.

    Args:
        draw: where chance comes from.
        kill: what is dealt.
        moment: when.
        sizes: world sizes, one after the other; the last stays.
    """

    def __init__(self, draw: random.Random, kill: Deed, moment: Moment, sizes: list[int]) -> None:
        self._draw = draw
        self._kill = kill
        self._moment = moment
        self._size = sizes[0]
        self._coming = iter(sizes[1:])

    def all(self, *, elastic: bool) -> Iterator[Disturbance]:
        """Three acts, of one or two disturbances each, in one of which is what was dealt.

        Args:
            elastic: in the first a node joins, for which the group leaves, and in the second it is lost.
        """
        last = elastic or self._moment is Moment.EXPORT
        special = 2 if last else self._draw.randrange(3)
        if self._moment is Moment.START and special == 0:
            yield self._disturbance(self._kill, Moment.START, 0)
            special = -1
        for act, step in enumerate(self._steps()):
            if act == special:
                yield from self._dealt(step)
            elif elastic:
                yield self._disturbance((Deed.GROW, Deed.LOSE_NODE)[act], Moment.STEP, step)
            else:
                yield self._drawn(step, (*KILLS, Deed.NOTICE))

    def _dealt(self, step: int) -> Iterator[Disturbance]:
        if self._moment in (Moment.START, Moment.RESTORE):
            yield self._drawn(step, (*(kill for kill in KILLS if kill.ends_group), Deed.NOTICE))
        after_step = {Moment.STEP: step, Moment.SAVE: step, Moment.EXPORT: STEPS}.get(self._moment, 0)
        yield self._disturbance(self._kill, self._moment, after_step)

    def _drawn(self, step: int, deeds: Sequence[Deed]) -> Disturbance:
        moment = self._draw.choice((Moment.STEP, Moment.STEP, Moment.SAVE))
        return self._disturbance(self._draw.choice(deeds), moment, step)

    def _steps(self) -> list[int]:
        steps = [self._draw.randint(*_FIRST_STEP)]
        for _ in range(2):
            steps.append(steps[-1] + self._draw.randint(*_STEPS_BETWEEN))
        return steps

    def _disturbance(self, deed: Deed, moment: Moment, after_step: int) -> Disturbance:
        if deed.ends_group and moment in (Moment.STEP, Moment.SAVE):
            self._size = next(self._coming, self._size)
        delay = round(self._draw.uniform(0, _LONGEST_DELAY_SECONDS), 3)
        return Disturbance(deed, moment, after_step, self._size, round(self._draw.random(), 3), delay)
