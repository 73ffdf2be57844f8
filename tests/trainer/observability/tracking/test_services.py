"""Tracking servers: one run, every step of it once, whatever becomes of drivers and of the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from mlflow import MlflowClient
from wandb import teardown

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.progress import Phase
from spotune_trainer.observability.tracking.remote import KINDS, Kind, Point, RemoteTracker, history
from spotune_trainer.observability.tracking.services import run_id, trackers_of
from spotune_trainer.observability.tracking.tracker import Tracker
from spotune_trainer.supervisor.ray_head.local import free_ports
from tests.trainer.support import wandb_server
from tests.trainer.support.tiny import make_job
from tests.trainer.support.waiting import wait_until

STEPS = 9
LOSSES = [(step, 10 / step) for step in range(1, STEPS + 1)]
EVALUATIONS = [(3, 0.5), (6, 0.25), (9, 0.125)]


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 10 / step, "tokens": 100, "seconds": 0.5, "epoch": step / STEPS, "gradNorm": None}


def write_steps(directory: JobDirectory, generation: int, steps: range) -> list[dict[str, Any]]:
    """What the workers of a generation leave: its steps, and in the ledger the evaluation of every third."""
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True, exist_ok=True)
    records = [record(step) for step in steps]
    for each in records:
        files.append_json(logs.steps, each)
    for step, loss in EVALUATIONS:
        if step in steps:
            Ledger(directory).append("evaluated", step=step, loss=loss)
    return records


def drive(tracker: Tracker, directory: JobDirectory, generation: int, steps: range, phase: Phase) -> None:
    """What a driver does for a tracker while one worker group takes some steps."""
    tracker.rewind(steps.start - 1)
    feed(tracker, directory, generation, steps)
    tracker.close(phase)


def feed(tracker: Tracker, directory: JobDirectory, generation: int, steps: range) -> None:
    """What the monitor does as it reads what the workers write."""
    for each in write_steps(directory, generation, steps):
        tracker.step(each)
        for step, loss in EVALUATIONS:
            if step == each["step"]:
                tracker.evaluated({"step": step, "loss": loss})


def drive_three(directory: JobDirectory, job: FinetuneJob) -> None:
    """Three drivers: the second goes on from before the end of the first, and the third dies before it sends all."""
    groups = [(None, range(1, 6)), (CheckpointName(3, 1), range(4, 8)), (CheckpointName(7, 2), range(8, STEPS + 1))]
    for restored, steps in groups:
        generation = claim(directory, restored).number
        (tracker,) = trackers_of(job, directory)
        drive(tracker, directory, generation, steps, Phase.DONE if steps.stop > STEPS else Phase.TRAINING)


@pytest.fixture(autouse=True)
def _one_driver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers of these tests share a process, so each waits for its own end."""
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._STOP_SECONDS", 60.0)


# The thread


class Memory:
    """A server in memory that may be away."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.failures = 0
        self.phases: list[Phase] = []
        self.away = threading.Event()

    def last_step(self, kind: Kind) -> int:
        return max((point.step for point in self.points if point.kind == kind), default=0)

    def log(self, points: Sequence[Point]) -> None:
        if self.away.is_set():
            self.failures += 1
            raise ConnectionError("no route to host")
        self.points += points

    def close(self, phase: Phase) -> None:
        self.phases.append(phase)


def test_a_server_that_was_away_gets_what_it_missed_once(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._BACKOFF_SECONDS", (0.01, 0.02))
    service, generation = Memory(), claim(directory, None).number
    tracker = RemoteTracker("memory", lambda: service, lambda: history(directory), send_every_seconds=0.01)
    tracker.rewind(0)
    feed(tracker, directory, generation, range(1, 4))
    assert wait_until(lambda: service.last_step("step") == 3 and service.last_step("evalStep") == 3, 10)
    service.away.set()
    feed(tracker, directory, generation, range(4, 8))
    assert wait_until(lambda: service.failures > 2, 10)
    assert service.last_step("step") == 3
    service.away.clear()
    assert wait_until(lambda: service.last_step("step") == 7, 10)
    tracker.close(Phase.DONE)
    for kind in KINDS:
        steps = [point.step for point in service.points if point.kind == kind]
        assert steps == ([1, 2, 3, 4, 5, 6, 7] if kind == "step" else [3, 6])
    assert service.phases == [Phase.DONE]


def test_nobody_waits_for_a_server_that_does_not_answer(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._LAST_SECONDS", 0.05)
    forever = threading.Event()

    def connect() -> Memory:
        forever.wait()
        return Memory()

    tracker = RemoteTracker("memory", connect, lambda: history(directory))
    tracker.rewind(0)
    for step in range(1, 1000):
        tracker.step(record(step))
    tracker.close(Phase.DONE)
    assert "memory did not take the last points" in caplog.text
    forever.set()


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[wandb_server.Server]:
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", wandb_server.KEY)
        yield server
        teardown()  # its process would go on with this server


def test_wandb_has_one_run_without_gaps_or_doubled_points(directory: JobDirectory, wandb: wandb_server.Server) -> None:
    job = make_job("/m", tracking={"tensorboard": False, "wandb": {"project": "sql"}})
    drive_three(directory, job)
    assert list(wandb.runs) == [run_id(directory)]
    run = wandb.runs[run_id(directory)]
    assert run.curve("train/loss") == LOSSES
    assert run.curve("train/tokensPerSecond") == [(step, 200.0) for step, _ in LOSSES]
    assert run.curve("eval/loss", "evalStep") == EVALUATIONS
    assert (run.project, run.exit_codes, run.preempted) == ("sql", [1, 1, 0], True)
    assert run.config["model"]["value"]["source"] == "/m"


def test_wandb_offline_leaves_every_step_once(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = make_job("/m", tracking={"tensorboard": False, "wandb": {"project": "sql"}})
    drive_three(directory, job)
    folders = sorted((directory.logs / "wandb/wandb").glob("offline-run-*"))
    assert [run_id(directory) in folder.name for folder in folders] == [True] * 3
    logged = files.read_json(directory.logs / "wandb/logged.json")
    assert logged == {"step": STEPS, "evalStep": 9}


# MLflow


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's own server."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_ports(1)[0]
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder)),
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        client = MlflowClient(tracking_uri=url)
        assert wait_until(lambda: _answers(client), 120)
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _answers(client: MlflowClient) -> bool:
    try:
        client.search_experiments()
    except Exception:  # noqa: BLE001 - whatever it is: not yet
        time.sleep(0.2)
        return False
    return True


@pytest.mark.timeout(300)
def test_mlflow_has_one_run_without_gaps_or_doubled_points(
    directory: JobDirectory, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    job = make_job("/m", tracking={"tensorboard": False, "mlflow": {"uri": mlflow_url}})
    drive_three(directory, job)
    client = MlflowClient(tracking_uri=mlflow_url)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    points = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in ("train/loss", "eval/loss")
    }
    assert points == {"train/loss": LOSSES, "eval/loss": EVALUATIONS}
    assert (run.info.status, run.data.params["model.source"]) == ("FINISHED", "/m")
