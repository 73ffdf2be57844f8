"""The supervisor over a scripted Ray head, which can fail at points where a real one rarely does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, JobError, StoppedError, SupersededError
from spotune_trainer import files
from spotune_trainer.job_directory.ledger import Ledger
from tests.trainer.support.scripted_ray import (
    POLICY,
    Run,
    ScriptedRay,
    cannot_start_the_driver,
    dies_at_submission,
    dies_while_running,
)


@pytest.mark.parametrize("death", [dies_at_submission, dies_while_running])
def test_dead_head_is_replaced(tmp_path: Path, death: Callable[[ScriptedRay], int | None]) -> None:
    run = Run(tmp_path, death, 0)
    run()
    assert run.ray.starts == 2
    assert run.attempts() == [(1, None), (2, 0)]
    assert run.causes() == ["headLost"]


def test_ray_says_why_a_driver_did_not_start(tmp_path: Path) -> None:
    run = Run(tmp_path, cannot_start_the_driver, 0)
    run()
    (failure,) = Ledger(run.directory).records("failure")
    assert failure["cause"] == "headLost"
    assert "Ray could not start it: Failed to start supervisor actor: ImportError: libarrow.so" in failure["message"]


def test_infrastructure_failures_are_retried_until_success(tmp_path: Path) -> None:
    run = Run(tmp_path, 10, 10, 10, 10, 10, 10, 0)
    run()
    assert run.ray.starts == 1
    assert run.attempts()[-1] == (7, 0)


def test_attempts_are_numbered_over_the_life_of_the_directory(tmp_path: Path) -> None:
    Run(tmp_path, 10, 0)()
    again = Run(tmp_path, 0)
    again()
    assert again.attempts()[-1] == (3, 0)


def test_phase_of_a_lost_driver_is_replaced_before_the_next_one_starts(tmp_path: Path) -> None:
    def records_the_phase(ray: ScriptedRay) -> int | None:
        phases.append((files.read_json(run.directory.status) or {})["phase"])
        return 0

    phases: list[str] = []
    run = Run(tmp_path, records_the_phase)
    files.write_json(run.directory.status, {"time": 1.0, "heartbeat": 7, "phase": "Training", "step": 40, "attempt": 1})
    run()
    assert phases == ["Starting"]


def test_termination_of_a_supervisor_beside_its_head_leaves_the_attempt_to_the_next_one(tmp_path: Path) -> None:
    def is_terminated(ray: ScriptedRay) -> int | None:
        run.control.terminate()
        return None

    run = Run(tmp_path, is_terminated)
    with pytest.raises(StoppedError):
        run(beside_head=True)
    ledger = Ledger(run.directory)
    assert ledger.open_attempts() == {1: False}
    assert ledger.records("stopped") == [], "a job that lost its head is still to be trained"


def test_termination_of_a_supervisor_stops_the_job(tmp_path: Path) -> None:
    def is_terminated(ray: ScriptedRay) -> int | None:
        run.control.terminate()
        return None

    run = Run(tmp_path, is_terminated)
    run.ray.notice = run.directory.notice
    with pytest.raises(StoppedError):
        run()
    assert run.attempts() == [(1, 10)]
    assert run.causes() == []
    assert len(Ledger(run.directory).records("stopped")) == 1


@pytest.mark.parametrize(("code", "error"), [(20, JobError), (30, SupersededError)])
def test_final_failure_has_the_drivers_message(
    tmp_path: Path, code: int, error: type[JobError] | type[SupersededError]
) -> None:
    run = Run(tmp_path, code)
    with pytest.raises(error, match="the last line of the driver"):
        run()
    assert not run.ray.alive


def test_supervisor_gives_up_on_a_crashing_driver_with_its_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 1, 1)
    with pytest.raises(InfrastructureError, match="the last line of the driver"):
        run()
    assert run.ray.acts == []


def test_notice_of_an_earlier_stop_does_not_stop_the_next_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.directory.notice.write_text('{"stop": true}')
    run()
    assert not run.directory.notice.exists()
    assert not run.directory.supervisor.exists()


def test_current_retry_policy_is_used_for_each_decision(tmp_path: Path) -> None:
    def crashes_for_the_last_time(ray: ScriptedRay) -> int | None:
        run.policy = POLICY.model_copy(update={"app_failure_limit": 2})
        return 1

    run = Run(tmp_path, 1, crashes_for_the_last_time, 1, 0)
    with pytest.raises(InfrastructureError, match="the last line of the driver"):
        run()
    assert len(run.ray.acts) == 2


def test_stopped_supervisor_submits_nothing_and_counts_no_failure(tmp_path: Path) -> None:
    def is_suspended(ray: ScriptedRay) -> int | None:
        run.control.suspend(5)
        return None

    run = Run(tmp_path, is_suspended, 0)
    run.ray.notice = run.directory.notice
    with pytest.raises(StoppedError):
        run(beside_head=True)
    assert run.attempts() == [(1, 10)]
    assert run.causes() == []
    with pytest.raises(StoppedError):
        run()
    run.control.resume()
    with pytest.raises(StoppedError):
        run(drain=True)
    assert run.attempts() == [(1, 10)]
    run()
    assert run.attempts() == [(1, 10), (2, 0)]
