"""Weights & Biases and MLflow: one run that has every step once, across restarts of drivers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient
from wandb import teardown

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.tracking.services import create_trackers, run_id
from spotune_trainer.observability.tracking.tracker import Tracker
from spotune_trainer.supervisor.ray_head.local import free_ports
from tests.trainer.support import wandb_server
from tests.trainer.support.tiny import make_job
from tests.trainer.support.tracked_runs import EVALUATIONS, LOSSES, STEPS, feed
from tests.trainer.support.waiting import wait_until


def drive(tracker: Tracker, directory: JobDirectory, generation: int, steps: range, phase: Phase) -> None:
    """Call a tracker like a driver does while one worker group trains some steps."""
    tracker.rewind(steps.start - 1)
    feed(tracker, directory, generation, steps)
    tracker.close(phase)


def drive_three(directory: JobDirectory, job: FinetuneJob) -> None:
    """Three drivers; the second resumes from a step before the end of the first."""
    groups = [(None, range(1, 6)), (CheckpointName(3, 1), range(4, 8)), (CheckpointName(7, 2), range(8, STEPS + 1))]
    for restored, steps in groups:
        generation = claim(directory, restored).number
        (tracker,) = create_trackers(job, directory)
        drive(tracker, directory, generation, steps, Phase.DONE if steps.stop > STEPS else Phase.TRAINING)


@pytest.fixture(autouse=True)
def _one_driver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers of these tests share a process, so each waits until its points are sent."""
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._RESTART_TIMEOUT_SECONDS", 60.0)


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[wandb_server.Server]:
    with wandb_server.serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", wandb_server.KEY)
        yield server
        teardown()  # otherwise its process keeps using this server


@pytest.mark.slow
def test_wandb_has_one_run_without_gaps_or_repeated_points(directory: JobDirectory, wandb: wandb_server.Server) -> None:
    job = make_job("/m", tracking={"tensorboard": False, "wandb": {"project": "sql"}})
    drive_three(directory, job)
    assert list(wandb.runs) == [run_id(directory)]
    run = wandb.runs[run_id(directory)]
    assert run.curve("train/loss") == LOSSES
    assert run.curve("train/tokensPerSecond") == [(step, 200.0) for step, _ in LOSSES]
    assert run.curve("eval/loss", "evalStep") == EVALUATIONS
    samples = {int(row["evalStep"]): row["eval/samples"]["path"] for row in run.history if "eval/samples" in row}
    assert list(samples) == [step for step, _ in EVALUATIONS]
    shown = wandb.uploads[samples[6]].decode()
    assert "<td>question 1</td><td>&lt;b&gt;6&lt;/b&gt; | no</td><td>yes</td>" in shown
    assert (run.project, run.exit_codes, run.preempted) == ("sql", [1, 1, 0], True)
    assert run.config["model"]["value"]["source"] == "/m"


@pytest.mark.long
def test_wandb_offline_writes_every_step_once(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A real MLflow server."""
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
        assert wait_until(lambda: _responds(client), 120)
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _responds(client: MlflowClient) -> bool:
    try:
        client.search_experiments()
    except Exception:  # noqa: BLE001 - any error: not ready yet
        time.sleep(0.2)
        return False
    return True


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_mlflow_has_one_run_without_gaps_or_repeated_points(
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
