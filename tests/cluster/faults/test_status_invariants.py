"""The status invariants accept a correct history and report every violation."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.faults.status_invariants import invariant_violations
from tests.cluster.faults.timeline import TrainingInterval
from tests.cluster.status_history import ObservedJob

BEGAN, LOST, BACK, DONE = 1000.0, 1100.0, 1150.0, 1200.0
INTERVALS = (
    TrainingInterval(1, BEGAN, {1: 1001.0, 50: LOST}, {}),
    TrainingInterval(2, BACK, {41: 1151.0, 90: DONE}, {}),
)
TRAINING = {"Training": "True", "Ready": "True", "Reconciling": "False"}
NOT_TRAINING = {"Training": "False", "Ready": "False", "Reconciling": "True"}


def seen(
    at: float, phase: str, conditions: Mapping[str, str], since: float | None = None, **status: Any
) -> ObservedJob:
    """A status at a time. Its conditions have that transition time, or another given one."""
    all_conditions = {"Complete": "False", "Failed": "False", "PreflightPassed": "True", **conditions}
    listed = [
        {"type": kind, "status": value, "lastTransitionTime": f"{since or at:.0f}/{kind}/{value}"}
        for kind, value in all_conditions.items()
    ]
    figures = {"phase": phase, "step": 0, "generation": 0, "restarts": {"total": 0, "headLost": 0}, **status}
    return ObservedJob(at, {"metadata": {"generation": 1, "uid": "a"}, "status": {**figures, "conditions": listed}})


def life() -> list[ObservedJob]:
    """A job that loses its head once and reports it."""
    once = {"total": 1, "headLost": 1}
    return [
        seen(900, "Provisioning", NOT_TRAINING, 900),
        seen(990, "Loading", NOT_TRAINING, 900),
        seen(1003, "Training", TRAINING, 1003, generation=1, step=3),
        seen(1090, "Training", TRAINING, 1003, generation=1, step=45),
        seen(1105, "Provisioning", NOT_TRAINING, 1105, generation=1, step=50),
        seen(1140, "Loading", NOT_TRAINING, 1105, generation=2, step=40, restarts=once),
        seen(1155, "Training", TRAINING, 1155, generation=2, step=44, restarts=once),
        seen(1202, "Complete", ENDED, 1202, generation=2, step=90, restarts=once),
    ]


ENDED = {"Training": "False", "Ready": "True", "Reconciling": "False", "Complete": "True"}


def with_one_more(*more: ObservedJob) -> list[ObservedJob]:
    """The same life with other statuses in it."""
    return sorted([*life(), *more], key=lambda one: one.time)


def test_correct_history_has_no_violations() -> None:
    # All conditions of a status share one transition time here, even those that did not change.
    assert [found for found in invariant_violations(life(), INTERVALS) if "lastTransitionTime" not in found] == []


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (seen(1145, "Training", TRAINING, generation=2, step=40), "Ready again"),
        (seen(950, "Training", TRAINING, step=0), "Ready again"),
        (seen(1160, "Nonsense", TRAINING, generation=2, step=45), "there is no phase 'Nonsense'"),
        (seen(1210, "Training", TRAINING, generation=2, step=90), "Complete was not the end: Training"),
        (seen(1095, "Training", TRAINING, generation=1, step=20), "went back from step 45 within generation 1"),
        (seen(1160, "Training", TRAINING, generation=1, step=90), "generation went back from 2 to 1"),
        (seen(1160, "Training", TRAINING, generation=2, step=45), "restarts.total went back from 1"),
        (seen(1160, "Training", {**TRAINING, "Stalled": "True"}, generation=2, step=45), "Ready and Stalled at once"),
        (seen(1160, "Training", {"Ready": "True"}, generation=2, step=45), "neither Training nor Complete"),
        (seen(1160, "Failed", TRAINING, generation=2, step=45), "an end that no condition says"),
        (
            seen(1160, "Training", {**TRAINING, "PreflightPassed": "Unknown"}, generation=2, step=45),
            "Training before PreflightPassed",
        ),
        (seen(1201, "Training", TRAINING, generation=2, step=89, restarts={"total": 3, "headLost": 1}), "not add up"),
        (seen(800, "Training", TRAINING), "Training, step 0: the first phase"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_violation_is_found(status: ObservedJob, message: str) -> None:
    assert any(message in found for found in invariant_violations(with_one_more(status), INTERVALS)), message


def test_ready_for_too_long_after_the_last_step_is_found() -> None:
    without_the_loss = [one for one in life() if one.time not in (1105, 1140)]
    found = invariant_violations(without_the_loss, INTERVALS)
    assert any("Ready 30 s after the last step" in message for message in found)


def test_operator_downtime_extends_the_deadline() -> None:
    """The operator has 30 s after its restart."""
    silent = [one for one in life() if one.time not in (1105, 1140)]
    end, begin = INTERVALS[0].end, INTERVALS[1].begin
    assert not any(
        "after the last step" in found for found in invariant_violations(silent, INTERVALS, [(end - 5, begin - 20)])
    )
    assert any(
        "after the last step" in found for found in invariant_violations(silent, INTERVALS, [(end - 50, end - 40)])
    )


def test_wrong_transition_time_or_dropped_condition_is_found() -> None:
    moved = [seen(900, "Provisioning", NOT_TRAINING, 900), seen(910, "Starting", NOT_TRAINING, 910)]
    assert any("Ready: False to False" in found for found in invariant_violations(moved, ()))
    dropped = [moved[0], ObservedJob(910, {**moved[1].job, "status": {**moved[1].status, "conditions": []}})]
    assert any("condition Ready was dropped" in found for found in invariant_violations(dropped, ()))
