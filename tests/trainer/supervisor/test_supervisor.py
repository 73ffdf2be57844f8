"""The supervisor over a Ray of the test's own making, which fails where a real one can hardly be made to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from spotune.errors import InfrastructureError, JobError, SupersededError
from spotune.job import RetrySpec
from spotune.job.lifecycle import BackoffSpec
from spotune.units.durations import Duration
from spotune_trainer import files
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.control import Orders
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob
from spotune_trainer.supervisor.supervisor import StoppedError, Supervisor
from tests.trainer.support.tiny import make_job

Act: TypeAlias = "int | Callable[[ScriptedRay], int | None]"
POLICY = RetrySpec(backoff=BackoffSpec(initial=Duration("0.01s"), max=Duration("0.01s")))


class ScriptedRay:
    """A head whose submissions play one act each: an exit code, or something that happens."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.jobs: dict[str, RayJob] = {}
        self.alive = False
        self.starts = 0
        self.notice: Path | None = None

    def find(self, record: Mapping[str, Any] | None) -> bool:
        return False

    def start(self) -> None:
        self.starts += 1
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def client(self) -> JobsClient:
        return ScriptedJobs(self)

    def record(self) -> dict[str, Any] | None:
        return None

    def end(self) -> None:
        self.alive = False
        self.jobs = {}


class ScriptedJobs(JobsClient):
    """The Jobs API of a scripted head."""

    def __init__(self, ray: ScriptedRay) -> None:
        super().__init__("http://nowhere", "secret")
        self.ray = ray

    def list_jobs(self) -> list[RayJob]:
        return list(self.ray.jobs.values())

    def find(self, submission_id: str) -> RayJob | None:
        job = self.ray.jobs.get(submission_id)
        if job is not None and self.ray.notice is not None and self.ray.notice.exists():
            return RayJob(submission_id, "FAILED", 10, "", job.metadata)
        return job

    def logs(self, submission_id: str) -> str:
        return "Traceback\nValueError: what the driver said last"

    def submit(self, entrypoint: str, submission_id: str, metadata: Mapping[str, str]) -> None:
        act = self.ray.acts.pop(0)
        code = act if isinstance(act, int) else act(self.ray)
        status = "SUCCEEDED" if code == 0 else "FAILED" if code is not None else "RUNNING"
        self.ray.jobs[submission_id] = RayJob(submission_id, status, code, "", metadata)


def dies(ray: ScriptedRay) -> int | None:
    """Ray dies before it has taken the submission."""
    ray.alive = False
    raise JobsUnavailableError("connection refused")


def dies_later(ray: ScriptedRay) -> int | None:
    """Ray dies when the driver runs."""
    ray.alive = False
    return None


class Run:
    def __init__(self, root: Path, *acts: Act) -> None:
        self.directory = JobDirectory(root)
        self.ray = ScriptedRay(*acts)
        self.orders = Orders()
        self.policy = POLICY
        self.lines: list[str] = []

    def __call__(self, *, drain: bool = False, beside_head: bool = False) -> None:
        supervisor = Supervisor(
            self.directory,
            lambda: self.policy,
            self.ray,
            PlainView(self.lines.append),
            orders=self.orders,
            beside_head=beside_head,
            timing=Timing(poll=0.0),
        )
        if drain:
            supervisor.drain()
        supervisor.run("http://127.0.0.1:8090")

    def causes(self) -> list[str]:
        return [record["cause"] for record in Ledger(self.directory).records("failure")]

    def attempts(self) -> list[tuple[int, int | None]]:
        return [(record["attempt"], record["exitCode"]) for record in Ledger(self.directory).records("attempt-ended")]


@pytest.mark.parametrize("death", [dies, dies_later])
def test_ray_that_dies_is_started_again(tmp_path: Path, death: Callable[[ScriptedRay], int | None]) -> None:
    run = Run(tmp_path, death, 0)
    run()
    assert run.ray.starts == 2
    assert run.attempts() == [(1, None), (2, 0)]
    assert run.causes() == ["headLost"]


def test_infrastructure_is_tried_again_until_it_holds(tmp_path: Path) -> None:
    run = Run(tmp_path, 10, 10, 10, 10, 10, 10, 0)
    run()
    assert run.ray.starts == 1
    assert run.attempts()[-1] == (7, 0)


def test_attempts_are_numbered_over_the_life_of_the_directory(tmp_path: Path) -> None:
    Run(tmp_path, 10, 0)()
    again = Run(tmp_path, 0)
    again()
    assert again.attempts()[-1] == (3, 0)


@pytest.mark.parametrize("found", [True, False], ids=["its Ray lives", "its Ray is gone"])
def test_what_a_killed_supervisor_left_of_a_trained_model_is_cleared_up(
    tmp_path: Path, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(Run(tmp_path))
    run.ray.alive = found
    monkeypatch.setattr(run.ray, "find", lambda record: found)
    run()
    assert not run.ray.alive
    assert run.ray.starts == 0
    assert not run.directory.supervisor.exists()
    assert run.attempts() == [(1, 0)]
    assert run.causes() == []


def test_driver_that_was_lost_before_it_said_that_it_had_finished_is_started_again(tmp_path: Path) -> None:
    run = finished(Run(tmp_path, 0))
    run.directory.ledger.unlink()
    run()
    assert run.attempts() == [(1, 0)]
    assert run.ray.starts == 1


def finished(run: Run) -> Run:
    """The directory of a run whose model is trained, and whose supervisor has not left."""
    put_job(run.directory, make_job("model"))
    files.write_json(run.directory.result, {"steps": 8})
    files.write_json(run.directory.supervisor, {"ray": {}})
    Ledger(run.directory).append("attempt-started", attempt=1)
    Ledger(run.directory).append("finished", step=8)
    return run


def test_attempt_that_ended_unseen_is_recorded_as_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    run()
    assert run.attempts() == [(4, None), (5, 0)]
    assert run.causes() == ["headLost"], "a lost head takes its supervisor along"


def test_the_end_of_a_lost_attempt_is_recorded_with_its_last_sign_of_life(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    files.write_json(run.directory.status, {"time": 1234.5, "heartbeat": 7, "phase": "Training", "attempt": 4})
    run()
    assert Ledger(run.directory).records("attempt-ended")[0]["lastSeen"] == 1234.5


@pytest.mark.parametrize(("code", "causes"), [(0, []), (10, []), (137, ["headLost"])])
def test_attempt_that_ray_knows_counts_as_lost_only_if_it_was(tmp_path: Path, code: int, causes: list[str]) -> None:
    run = Run(tmp_path, 0)
    Ledger(run.directory).append("attempt-started", attempt=4)
    ours = {"spotune-directory": str(tmp_path), "spotune-attempt": "4"}
    run.ray.jobs["earlier"] = RayJob("earlier", "SUCCEEDED" if code == 0 else "FAILED", code, "", ours)
    run()
    assert run.attempts() == [(4, code), (5, 0)]
    assert run.causes() == causes


def test_last_words_of_a_driver_that_is_gone_are_taken_back_before_the_next_one_speaks(tmp_path: Path) -> None:
    def finds_no_lie(ray: ScriptedRay) -> int | None:
        phases.append((files.read_json(run.directory.status) or {})["phase"])
        return 0

    phases: list[str] = []
    run = Run(tmp_path, finds_no_lie)
    files.write_json(run.directory.status, {"time": 1.0, "heartbeat": 7, "phase": "Training", "step": 40, "attempt": 1})
    run()
    assert phases == ["Starting"]


@pytest.mark.parametrize("beside_head", [True, False])
def test_leaving_is_a_lost_head_for_a_supervisor_that_lives_beside_it(tmp_path: Path, beside_head: bool) -> None:
    def is_told_to_leave(ray: ScriptedRay) -> int | None:
        run.orders.leave()
        return None

    run = Run(tmp_path, is_told_to_leave)
    run.ray.notice = run.directory.notice
    with pytest.raises(StoppedError):
        run(beside_head=beside_head)
    assert run.attempts() == [(1, 10)]
    assert run.causes() == (["headLost"] if beside_head else [])
    stopped = Ledger(run.directory).records("stopped")
    assert len(stopped) == (0 if beside_head else 1), "a job that lost its head is still to be trained"


@pytest.mark.parametrize(("code", "error"), [(20, JobError), (30, SupersededError)])
def test_final_failure_is_told_in_the_drivers_words(
    tmp_path: Path, code: int, error: type[JobError] | type[SupersededError]
) -> None:
    run = Run(tmp_path, code)
    with pytest.raises(error, match="what the driver said last"):
        run()
    assert not run.ray.alive


def test_driver_that_always_crashes_is_given_up_with_its_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 1, 1)
    with pytest.raises(InfrastructureError, match="what the driver said last"):
        run()
    assert run.ray.acts == []


def test_notice_of_an_earlier_stop_does_not_stop_the_next_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    run.directory.notice.write_text('{"stop": true}')
    run()
    assert not run.directory.notice.exists()
    assert not run.directory.supervisor.exists()


def test_policy_is_asked_for_at_every_decision(tmp_path: Path) -> None:
    def crashes_for_the_last_time(ray: ScriptedRay) -> int | None:
        run.policy = POLICY.model_copy(update={"app_failure_limit": 2})
        return 1

    run = Run(tmp_path, 1, crashes_for_the_last_time, 1, 0)
    with pytest.raises(InfrastructureError, match="what the driver said last"):
        run()
    assert len(run.ray.acts) == 2


def test_stopped_supervisor_submits_nothing_and_counts_no_failure(tmp_path: Path) -> None:
    def is_told_to_stop(ray: ScriptedRay) -> int | None:
        run.orders.stop(5)
        return None

    run = Run(tmp_path, is_told_to_stop, 0)
    run.ray.notice = run.directory.notice
    with pytest.raises(StoppedError):
        run(beside_head=True)
    assert run.attempts() == [(1, 10)]
    assert run.causes() == []
    with pytest.raises(StoppedError):
        run()
    run.orders.start()
    with pytest.raises(StoppedError):
        run(drain=True)
    assert run.attempts() == [(1, 10)]
    run()
    assert run.attempts() == [(1, 10), (2, 0)]
