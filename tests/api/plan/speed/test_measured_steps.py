"""The plan's time of a step, compared with what was measured on H200s."""

from __future__ import annotations

import pytest

from tests.trainer.support.planned_runs import STEPS_NOT_PREDICTED, MeasuredRun, runs_with_step_time

RUNS = runs_with_step_time()
PREDICTED = [run for run in RUNS if (run.output, run.number) not in STEPS_NOT_PREDICTED]
OTHERS = [run for run in RUNS if (run.output, run.number) in STEPS_NOT_PREDICTED]


def _name(run: MeasuredRun) -> str:
    return f"{run.output}-{run.number}"


def _error(run: MeasuredRun) -> float | None:
    step, measured = run.planned_step(), run.case["stepSeconds"]
    return None if step is None else step.seconds / measured - 1


@pytest.mark.parametrize("run", PREDICTED, ids=_name)
def test_a_step_takes_the_planned_time(run: MeasuredRun) -> None:
    error = _error(run)
    assert error is not None
    assert abs(error) < 0.15


def test_the_most_used_cases_are_nearer() -> None:
    """FP8 and bf16 at 1.1B and 8B, and long rows."""
    outputs = ("throughput_1_fp8", "throughput_1_8B_fp8", "long_rows")
    errors = [_error(run) for run in PREDICTED if run.output in outputs]
    assert len(errors) == 21
    assert all(error is not None and abs(error) < 0.07 for error in errors)


def test_exceptions_are_those_that_need_a_reason() -> None:
    assert len(OTHERS) == len(STEPS_NOT_PREDICTED)
    for run in OTHERS:
        error = _error(run)
        assert error is None or abs(error) > 0.15, _name(run)


def test_mfu_is_the_one_that_the_run_reported() -> None:
    """The planned operations over the measured time, where rows had no padding and the meter of a run was used.

    That meter counted packed rows whole when they were measured.
    """
    outputs = [run for run in PREDICTED if run.output.startswith("throughput_1_")]
    runs = [run for run in outputs if not run.case["size"].startswith("t5") and run.case.get("documents", 1) == 1]
    assert len(runs) > 20
    for run in runs:
        step = run.planned_step()
        assert step is not None
        assert step.mfu * step.seconds / run.case["stepSeconds"] == pytest.approx(run.case["mfu"], rel=0.02)
