"""The checker accepts a correct run under faults, and reports every kind of violation that is planted in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from spotune_trainer.checkpoint.layout import CheckpointName
from tests.cluster.chaos.checker import ChaosEvidence, findings, shown
from tests.cluster.chaos.object_faults import LOSS_OF_A_STRANGER
from tests.cluster.faults.timeline import TrainingInterval
from tests.cluster.status_history import ObservedJob
from tests.proof.history import Generation, Record

STEPS, PER_EPOCH, KILLED, COMMITTED = 120, 3, 50, 40
EPOCH_HASH = 60
BEGAN, LOST, BACK, DONE = 1000.0, 1050.0, 1100.0, 1180.0
"""A step takes a second; step 50 is the last one of the first group, and the second one begins with step 41."""
TRAINING = {"Training": "True", "Ready": "True", "Reconciling": "False"}
NOT_TRAINING = {"Training": "False", "Ready": "False", "Reconciling": "True"}


def record(step: int, **values: Any) -> Record:
    """A step whose rows add up to EPOCH_HASH over an epoch."""
    samples = f"{(step - 1) % PER_EPOCH * 10 + 10:016x}"
    return {"step": step, "loss": loss_of(step), "samples": samples, "worldSize": 2, **values}


def records(first: int, last: int) -> tuple[Record, ...]:
    return tuple(record(step) for step in range(first, last + 1))


def loss_of(step: int) -> float:
    return 6.0 - step / 100


def changed(steps: Sequence[Record], step: int, **values: Any) -> tuple[Record, ...]:
    return tuple({**each, **values} if each["step"] == step else each for each in steps)


def status(at: float, phase: str, conditions: Mapping[str, str], **fields: Any) -> ObservedJob:
    everything = {"Complete": "False", "Failed": "False", "PreflightPassed": "True", **conditions}
    listed = [
        {"type": kind, "status": value, "lastTransitionTime": f"{kind} {value}"} for kind, value in everything.items()
    ]
    content = {"phase": phase, "step": 0, "generation": 0, "restarts": {"total": 0}, **fields, "conditions": listed}
    return ObservedJob(at, {"metadata": {"generation": 1, "uid": "a"}, "status": content})


def steps_shown(generation: int, begin: float, first: int, last: int) -> list[ObservedJob]:
    """A status after every step."""
    return [
        status(
            begin + step - first + 1.5,
            "Training",
            TRAINING,
            generation=generation,
            step=step,
            loss=shown(loss_of(step)),
        )
        for step in range(first, last + 1)
    ]


def statuses() -> list[ObservedJob]:
    """Loses its head once, and says so 5 s later."""
    complete = {**TRAINING, "Training": "False", "Complete": "True"}
    return [
        status(990.0, "Provisioning", NOT_TRAINING),
        *steps_shown(1, BEGAN, 1, KILLED),
        status(1055.0, "Provisioning", NOT_TRAINING, generation=1, step=KILLED, loss=loss_of(KILLED)),
        status(1090.0, "Loading", NOT_TRAINING, generation=2, step=COMMITTED),
        *steps_shown(2, BACK, COMMITTED + 1, STEPS),
        status(1185.0, "Complete", complete, generation=2, step=STEPS, loss=loss_of(STEPS)),
    ]


def run() -> ChaosEvidence:
    first = Generation(1, None, BEGAN - 5, records(1, KILLED), None)
    second = Generation(2, CheckpointName(COMMITTED, 1), BACK - 5, records(COMMITTED + 1, STEPS), DONE)
    return ChaosEvidence(
        problem="",
        planned_steps=STEPS,
        steps_per_epoch=PER_EPOCH,
        epoch_hash=EPOCH_HASH,
        generations=(first, second),
        reference=records(1, STEPS),
        sha256="a",
        reference_sha256="a",
        statuses=statuses(),
        intervals=(
            TrainingInterval(1, BEGAN, {step: BEGAN + step for step in range(1, KILLED + 1)}, {}),
            TrainingInterval(2, BACK, {step: BACK + step - COMMITTED for step in range(COMMITTED + 1, STEPS + 1)}, {}),
        ),
        operator_downtime=(),
    )


def relevant(evidence: ChaosEvidence) -> list[str]:
    """Without the times of transitions, which this history does not have."""
    return [finding for finding in findings(evidence) if "lastTransitionTime" not in finding]


def with_steps(steps: Callable[[Sequence[Record]], Sequence[Record]]) -> ChaosEvidence:
    """The run with other steps of its second generation."""
    first, second = run().generations
    return replace(run(), generations=(first, replace(second, steps=tuple(steps(second.steps)))))


def with_statuses(*more: ObservedJob, without: tuple[float, float] = (0.0, 0.0)) -> ChaosEvidence:
    """The run with further statuses, and without those of a time."""
    kept = [each for each in statuses() if not without[0] < each.time < without[1]]
    return replace(run(), statuses=sorted([*kept, *more], key=lambda each: each.time))


def test_correct_run_has_no_findings() -> None:
    assert relevant(run()) == []


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (replace(run(), problem="the job has failed"), "the job has failed"),
        (replace(run(), planned_steps=STEPS + 1), "of 121 steps, 1 are missing and 0 count twice"),
        (with_steps(lambda steps: [*steps, steps[-1]]), "0 are missing and 1 count twice"),
        (with_steps(lambda steps: [steps[1], steps[0], *steps[2:]]), "not in order"),
        (with_steps(lambda steps: changed(steps, 60, samples=f"{10:016x}")), "generation 2 trained on other rows"),
        (with_steps(lambda steps: changed(steps, 60, samples=f"{10:016x}")), "exactly once in 1 epochs"),
        (with_steps(lambda steps: changed(steps, 60, loss=loss_of(60) * (1 + 1e-15))), "generation 2 had another loss"),
        (replace(run(), sha256="b"), "weights differ"),
        (replace(run(), sha256=None), "no model was exported"),
    ],
)
def test_wrong_model_is_found(evidence: ChaosEvidence, message: str) -> None:
    assert any(message in finding for finding in relevant(evidence)), relevant(evidence)


def test_other_rows_of_a_lost_step_are_found() -> None:
    first, second = run().generations
    wrong = replace(first, steps=changed(first.steps, 48, samples=f"{99:016x}"))
    found = relevant(replace(run(), generations=(wrong, second)))
    assert found == ["generation 1 trained on other rows than the undisturbed run in 1 steps, the first of them 48"]


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (
            with_statuses(status(1086.6, "Training", TRAINING, generation=2, step=COMMITTED)),
            "Ready again, 13.4 s before the next step began",
        ),
        (
            with_statuses(status(1120.2, "Training", TRAINING, generation=2, step=45, loss=loss_of(45))),
            "went back from step 59 within generation 2",
        ),
        (
            with_statuses(status(1092.0, "Loading", NOT_TRAINING, generation=2, step=COMMITTED, loss=loss_of(KILLED))),
            "the loss 5.5 is shown, which is not that of the step",
        ),
        (
            with_statuses(status(995.0, "Loading", NOT_TRAINING, generation=1, step=0, loss=loss_of(KILLED))),
            "the loss 5.5 is shown, which is not that of the step",
        ),
        (
            with_statuses(status(1120.7, "Training", TRAINING, generation=2, step=60, loss=5.0)),
            "the loss 5.0 is shown, which is not that of the step",
        ),
        (with_statuses(without=(1052.0, 1100.0)), "said Training or Ready, but no steps were made for"),
        (with_statuses(without=(1100.0, 1181.0)), "had a phase without steps, but steps were made"),
    ],
)
def test_untrue_status_is_found(evidence: ChaosEvidence, message: str) -> None:
    assert any(message in finding for finding in relevant(evidence)), relevant(evidence)


def test_status_of_a_stranger_that_stays_is_found() -> None:
    patched = {"generation": 2, "step": 1, "loss": LOSS_OF_A_STRANGER}
    replaced = with_statuses(status(1120.7, "Loading", TRAINING, **patched))
    assert relevant(replaced) == []
    kept = with_statuses(status(1120.7, "Loading", TRAINING, **patched), without=(1120.7, 1181.0))
    assert any("kept what a stranger wrote" in finding for finding in relevant(kept))


@pytest.mark.parametrize(("lost", "is_found"), [("True", True), ("False", False)])
def test_conditions_count_in_a_status_that_a_stranger_has_changed(lost: str, is_found: bool) -> None:
    """The cluster is lost and back while a stranger's step is shown; or it never was, and the time is wrong."""
    patched = {"generation": 1, "step": 1, "loss": LOSS_OF_A_STRANGER}
    history = [
        status(990.0, "Provisioning", {**NOT_TRAINING, "ClusterReady": "True"}),
        status(991.0, "Loading", {**NOT_TRAINING, "ClusterReady": lost}, **patched),
        status(
            992.0, "Loading", {**NOT_TRAINING, "ClusterReady": "True"}, generation=1, step=2, loss=shown(loss_of(2))
        ),
    ]
    for condition in history[-1].status["conditions"]:
        condition["lastTransitionTime"] += " again" if condition["type"] == "ClusterReady" else ""
    found = findings(replace(run(), statuses=history))
    assert any("ClusterReady: True to True" in finding for finding in found) == is_found, found


@pytest.mark.parametrize(("training", "is_found"), [("False", True), ("Unknown", False)])
def test_unknown_training_denies_no_steps(training: str, is_found: bool) -> None:
    """The head is lost in the second group, whose workers train on for a minute without one."""
    headless = status(1110.7, "Provisioning", {**NOT_TRAINING, "Training": training}, generation=2, step=50)
    found = relevant(with_statuses(headless, without=(1110.0, 1170.0)))
    assert any("steps were made" in finding for finding in found) == is_found, found


def test_operator_that_does_not_run_is_excused_until_it_is_back() -> None:
    late = with_statuses(without=(1052.0, 1085.0))
    assert any("Ready" in finding for finding in relevant(late))
    assert relevant(replace(late, operator_downtime=[(1045.0, 1070.0)])) == []


def test_ready_while_a_rank_is_stopped_for_long_is_found() -> None:
    """Within one generation: one step takes 40 s, and the status says Training all the time."""
    steps = {**{step: BEGAN + step for step in range(1, 31)}, **{step: BEGAN + step + 40 for step in range(31, 51)}}
    first, second = run().intervals
    silent = with_statuses(without=(1031.0, 1099.0))
    paused = replace(silent, intervals=(replace(first, steps=steps), second))
    found = [finding for finding in relevant(paused) if "no steps were made" in finding]
    assert len(found) == 1
