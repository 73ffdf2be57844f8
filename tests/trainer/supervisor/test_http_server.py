"""What `/progress`, `/metrics` and `/healthz` answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.http_server import ProgressServer, metrics_lines

STATUS = {
    "time": 1000.0,
    "heartbeat": 9,
    "phase": "Training",
    "generation": 2,
    "attempt": 1,
    "step": 30,
    "totalSteps": 100,
    "loss": 2.5,
    "evalLoss": None,
    "evalScores": {"exactMatch": 0.5, "bleu": 41.25},
    "workers": {"running": 2, "wanted": 3},
    "lastCheckpoint": {"step": 20, "time": 990.0},
    "restarts": {"workerLost": 1, "hang": 0},
    "stepsLost": 4,
    "goodput": 0.75,
    "goodputParts": {"productive": 30.0, "lost": 7.5, "startup": 2.5},
    "ageSeconds": 0.5,
}


class Job:
    """A served job that can fall ill."""

    def __init__(self, root: Path) -> None:
        self.directory = JobDirectory(root)
        self.health_problem: str | None = None
        self.url = ""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    with ProgressServer(job.directory, lambda: job.health_problem) as server:
        job.url = server.url
        yield job


def get(url: str) -> tuple[int, str]:
    try:
        with urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_progress_is_the_status_and_its_age(job: Job) -> None:
    files.write_json(job.directory.status, {**STATUS, "time": time.time() - 3})
    code, text = get(f"{job.url}/progress")
    progress = json.loads(text)
    assert code == 200
    assert progress["step"] == 30
    assert progress["ageSeconds"] >= 3


def test_progress_says_that_the_volume_is_full(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full volume the driver cannot publish the problem itself."""
    files.write_json(job.directory.status, STATUS)
    assert json.loads(get(f"{job.url}/progress")[1])["checkpointProblem"] is None
    volume = os.statvfs_result((4096, 4096, 100_000, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    problem = json.loads(get(f"{job.url}/progress")[1])["checkpointProblem"]
    assert problem == "No space left on the volume: 0.0 MB of 0.4 GB are free"


def test_progress_before_the_first_status_is_not_available(job: Job) -> None:
    assert get(f"{job.url}/progress")[0] == 503
    assert get(f"{job.url}/metrics") == (200, "")


def test_healthz_follows_the_heartbeat(job: Job) -> None:
    assert get(f"{job.url}/healthz") == (200, "ok\n")
    job.health_problem = "no heartbeat for 2000 s"
    assert get(f"{job.url}/healthz") == (503, "no heartbeat for 2000 s\n")


def test_unknown_path_is_answered_with_the_known_ones(job: Job) -> None:
    assert get(f"{job.url}/") == (404, "unknown path; available: /progress, /metrics, /healthz\n")


def test_metrics_contain_known_values_only() -> None:
    lines = list(metrics_lines(STATUS))
    assert "spotune_step 30" in lines
    assert "spotune_loss 2.5" in lines
    assert 'spotune_workers{state="wanted"} 3' in lines
    assert 'spotune_restarts_total{cause="workerLost"} 1' in lines
    assert 'spotune_phase{phase="Training"} 1' in lines
    assert "spotune_checkpoint_step 20" in lines
    assert 'spotune_eval_score{metric="exactMatch"} 0.5' in lines
    assert 'spotune_eval_score{metric="bleu"} 41.25' in lines
    assert "spotune_goodput_ratio 0.75" in lines
    assert 'spotune_time_seconds{part="lost"} 7.5' in lines
    assert not any("eval_loss" in line for line in lines)
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
