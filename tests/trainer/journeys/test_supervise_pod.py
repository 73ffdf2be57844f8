"""`spotune supervise` on a real Ray head: a stop during training commits, and a start resumes exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.local import LocalRay, RunningRay, free_ports
from tests.trainer.support.pods import request
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout, Runs, train_generation
from tests.trainer.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WORKERS = 2
EPOCHS = 24
STEPS = EPOCHS * STEPS_PER_EPOCH
_PATIENCE_SECONDS = 240.0
_SPOTUNE = "from spotune.cli.main import main; main()"


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RunningRay]:
    """A Ray head that the supervisor does not own."""
    head = LocalRay(tmp_path, WORKERS, gpus=False)
    head.start()
    try:
        assert head.running is not None
        yield head.running
    finally:
        head.shut_down()


class Container:
    """The supervisor's container of a head pod."""

    def __init__(self, root: Path, job: FinetuneJob, ray: RunningRay) -> None:
        self.directory = JobDirectory(root / "job")
        self.job_file = root / "job.yaml"
        self.mount(job)
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        options = ["--directory", str(self.directory.root), "--ray", ray.url, "--serve", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SPOTUNE, "supervise", str(self.job_file), *options],
            env={**os.environ, "RAY_AUTH_TOKEN": (ray.temporary / "token").read_text()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def mount(self, job: FinetuneJob) -> None:
        self.job_file.write_text(job.model_dump_json(exclude_unset=True))

    def progress(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(request(f"{self.url}/progress")[1])
        except OSError:  # it does not listen yet
            return {"phase": "", "supervisor": {"state": ""}}
        return found

    def until(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        assert wait_until(lambda: bool(condition(self.progress())), _PATIENCE_SECONDS), f"{what}: {self.progress()}"
        return self.progress()

    def until_state(self, state: str) -> dict[str, Any]:
        return self.until(lambda progress: progress["supervisor"]["state"] == state, state)

    def terminate(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode


def long_job(runs: Runs, **checkpoint: Any) -> FinetuneJob:
    """A job with enough steps to be stopped, and with commits on request only."""
    return runs.job(
        training={"epochs": EPOCHS},
        checkpoint={"every": 10_000, **checkpoint},
        execution={"zeroStage": 2, "microBatchSize": 3},
        workers={"count": WORKERS, "gpus": 0},
    )


@pytest.mark.long
def test_stopped_job_has_committed_its_last_step_and_resumes_to_the_same_weights(
    runs: Runs, ray: RunningRay, tmp_path: Path
) -> None:
    container = Container(tmp_path, long_job(runs), ray)
    try:
        container.until(lambda progress: (progress.get("step") or 0) >= 20, "it trains")
        container.mount(long_job(runs, keep=7))
        assert request(f"{container.url}/stop", "POST", b'{"seconds": 60}')[0] == 200
        stopped = container.until_state("stopped")
        (checkpoint,) = list_checkpoints(container.directory.checkpoints)
        assert isinstance(checkpoint, Checkpoint)
        assert 20 <= checkpoint.name.step < STEPS
        assert checkpoint.name.step == surviving_steps(container.directory)[-1]["step"]
        assert stopped["lastCheckpoint"]["step"] == checkpoint.name.step

        assert request(f"{container.url}/start", "POST")[0] == 200
        done = container.until_state("trained")
        logs = request(f"{container.url}/logs")[1]
    finally:
        code = container.terminate()

    assert code == 0
    assert (done["phase"], done["step"], done["attempt"], done["generation"]) == ("Done", STEPS, 2, 2)
    assert (done["resumedFromStep"], done["stepsLost"]) == (checkpoint.name.step, 0)
    assert done["supervisor"]["preflight"]["passed"]
    events = Ledger(container.directory)
    assert [event["fields"] for event in events.records("job-changed")] == [["spec.checkpoint"]]
    assert events.records("failure") == []
    assert "gen-1/worker-1:" in logs
    assert logs.index("gen-1/worker-0:") < logs.index("driver-2:") < logs.index("gen-2/worker-0:")
    undisturbed = train_generation(runs.empty("undisturbed"), long_job(runs), Layout(WORKERS, 2))
    result = json.loads(container.directory.result.read_text())
    assert result["exportSha256"] == undisturbed.summary["exportSha256"]
    assert result["steps"] == undisturbed.summary["steps"] == STEPS
