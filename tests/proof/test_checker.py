"""The checker accepts an exact run and reports every kind of violation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from spotune_trainer.checkpoint.layout import CheckpointName
from tests.proof.checker import ComparedSegment, Evidence, findings
from tests.proof.history import Generation, Record, Segment

STEPS, PER_EPOCH = 40, 5
KILLED, COMMITTED = 20, 16
START = CheckpointName(COMMITTED, 1)
EPOCH_HASH = 150


def record(step: int, **values: Any) -> Record:
    """A step whose epoch's hashes add up to EPOCH_HASH."""
    samples = f"{(step - 1) % PER_EPOCH * 10 + 10:016x}"
    return {"step": step, "loss": 6.0 - step / 100, "samples": samples, "worldSize": 2, **values}


def records(first: int, last: int, **values: Any) -> tuple[Record, ...]:
    return tuple(record(step, **values) for step in range(first, last + 1))


def changed(steps: Sequence[Record], step: int, **values: Any) -> tuple[Record, ...]:
    """The same steps with one of them changed."""
    return tuple({**each, **values} if each["step"] == step else each for each in steps)


def run(after: int = 2) -> Evidence:
    """Two workers were killed after step 20; `after` workers resumed from step 16."""
    late = records(COMMITTED + 1, STEPS, worldSize=after)
    generations = (
        Generation(1, None, 100.0, records(1, KILLED), None),
        Generation(2, START, 200.0, late, 300.0),
    )
    whole = records(1, STEPS)
    if after == 2:
        compared = [ComparedSegment(Segment(2, None, whole), whole, same_bits=True, by_old_world=None)]
    else:
        first = Segment(2, None, records(1, COMMITTED))
        second = Segment(after, START, late)
        compared = [
            ComparedSegment(first, first.steps, same_bits=True, by_old_world=None),
            ComparedSegment(second, late, same_bits=True, by_old_world=late[:10]),
        ]
    return Evidence(
        exit_code=0,
        planned_steps=STEPS,
        steps_per_epoch=PER_EPOCH,
        epoch_hash=EPOCH_HASH,
        generations=generations,
        undisturbed=whole,
        compared=compared,
        corrupt={},
        committed={START: 150.0},
        export_sha256="abc",
        claimed_sha256="abc",
        causes=["workerLost"],
        left_behind=[],
    )


def with_steps(evidence: Evidence, number: int, change: Callable[[tuple[Record, ...]], Sequence[Record]]) -> Evidence:
    """The same evidence with changed steps of one generation."""
    generations = [
        replace(each, steps=tuple(change(each.steps))) if each.number == number else each
        for each in evidence.generations
    ]
    return replace(evidence, generations=generations)


def with_segment(evidence: Evidence, number: int, **values: Any) -> Evidence:
    """The same evidence with one compared segment changed."""
    compared = list(evidence.compared)
    compared[number] = replace(compared[number], **values)
    return replace(evidence, compared=compared)


def zombie(evidence: Evidence) -> Evidence:
    """A generation between the two started from the beginning."""
    first, second = evidence.generations
    between = Generation(2, None, 120.0, (), None)
    return replace(evidence, generations=[first, between, replace(second, number=3)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_exact_run_has_no_findings(world_size: int) -> None:
    assert findings(run(world_size)) == []


BROKEN = [
    (replace(run(), exit_code=10), ["the command exited with 10"]),
    (replace(run(), causes=["workerLost", "appError"]), ["a failure has the unexpected cause appError"]),
    (replace(run(), left_behind=["process ray::IDLE"]), ["left behind: process ray::IDLE"]),
    (
        with_steps(run(), 2, lambda steps: steps[:-1]),
        [
            "of 40 steps, 1 are missing and 0 are counted twice",
            "not every sample was trained on exactly once in epoch 8",
        ],
    ),
    (
        with_steps(run(), 2, lambda steps: [*steps, steps[-1]]),
        [
            "of 40 steps, 0 are missing and 1 are counted twice",
            "not every sample was trained on exactly once in epoch 8",
        ],
    ),
    (
        with_steps(run(), 2, lambda steps: changed(steps, 18, samples=f"{77:016x}")),
        [
            "generation 2 trained on different samples than the undisturbed run in step 18",
            "not every sample was trained on exactly once in epoch 4",
        ],
    ),
    (
        with_steps(run(), 1, lambda steps: changed(steps, 18, samples=f"{77:016x}")),
        ["generation 1 trained on different samples than the undisturbed run in step 18"],
    ),
    (
        with_steps(run(), 2, lambda steps: changed(steps, 30, loss=5.71)),
        ["the curve differs by 1.8e-03 from the undisturbed one (1e-03 allowed)"],
    ),
    (
        with_steps(run(), 2, lambda steps: changed(steps, 30, loss=None)),
        ["the curve differs by inf from the undisturbed one (1e-03 allowed)"],
    ),
    (
        with_segment(run(), 0, again=changed(records(1, STEPS), 30, loss=5.7000001)),
        ["the 40 steps of 2 workers after step 0 have different losses than the undisturbed run in step 30"],
    ),
    (
        with_segment(run(3), 1, same_bits=False),
        ["the 24 steps of 3 workers after step 16 end with different bits than the undisturbed run"],
    ),
    (
        with_segment(run(3), 1, by_old_world=changed(records(17, 26), 26, loss=5.74001)),
        [
            (
                "after the change from 2 to 3 workers at step 16 a loss differs by 1.7e-06 "
                "from that of 2 workers (1e-06 allowed)"
            ),
        ],
    ),
    (
        with_segment(run(3), 1, by_old_world=records(17, 25)),
        ["after the change from 2 to 3 workers at step 16 fewer than 10 steps could be compared"],
    ),
    (
        zombie(run()),
        [
            (
                "generation 3 resumed from step-00000016.gen-1 of a superseded generation: "
                "generation 2 had started from step 0"
            ),
        ],
    ),
    (
        replace(run(), generations=[replace(run().generations[0], exported=250.0), run().generations[1]]),
        ["generation 1 exported the model after it was superseded"],
    ),
    (
        replace(run(), corrupt={START: "rank-00001.safetensors is missing"}),
        ["training resumed from step-00000016.gen-1, which is corrupt: rank-00001.safetensors is missing"],
    ),
    (
        replace(run(), committed={}),
        ["generation 2 resumed from step-00000016.gen-1 before it was committed"],
    ),
    (
        replace(run(), claimed_sha256="0bc"),
        ["the exported weights do not have the SHA-256 that the run reported"],
    ),
    (replace(run(), export_sha256=None), ["no model was exported"]),
]


@pytest.mark.parametrize(("evidence", "expected"), BROKEN, ids=[expected[0] for _, expected in BROKEN])
def test_violation_is_reported(evidence: Evidence, expected: list[str]) -> None:
    assert findings(evidence) == expected
