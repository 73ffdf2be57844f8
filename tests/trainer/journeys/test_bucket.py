"""`spotune run` whose storage is a bucket: any machine continues it, and the older of two writers is fenced off."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotune.errors import SupersededError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import list_checkpoint_files
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.writer import newest_state
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support import buckets
from tests.trainer.support.live import LiveRun
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout, Runs, train_generation
from tests.trainer.support.unreliable_server import UnreliableServer

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

WORKERS, ZERO_STAGE, EPOCHS = 2, 2, 14
STEPS = EPOCHS * STEPS_PER_EPOCH


@dataclass
class Machines:
    """Runs of one job in one bucket, each with a directory of its own, as machines have."""

    runs: Runs
    job: FinetuneJob
    bucket: Bucket
    server: UnreliableServer
    made: list[LiveRun]

    def start(self) -> LiveRun:
        run = LiveRun(self.runs.empty("machine"), self.job)
        self.made.append(run)
        run.start("--bucket", self.bucket.url)
        return run

    def wait_for_commits(self, run: LiveRun, step: int) -> None:
        """Wait until the bucket has a checkpoint of `step` or a later one."""
        run.wait_until(lambda: any(int(name[5:13]) >= step for name in self.committed()), f"a commit of step {step}")

    def committed(self) -> list[str]:
        return sorted(name for name, found in list_checkpoint_files(self.bucket).items() if "manifest.json" in found)


@pytest.fixture(scope="module")
def job(runs: Runs) -> FinetuneJob:
    return runs.job(
        training={"epochs": EPOCHS},
        checkpoint={"every": 4, "keep": 2},
        execution={"zeroStage": ZERO_STAGE, "microBatchSize": 3},
        workers={"count": WORKERS, "gpus": 0},
        retry={"backoff": {"initial": "500ms", "max": "1s"}},
    )


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, job: FinetuneJob) -> JobDirectory:
    """The same training without any fault and without a bucket: two processes, no Ray."""
    directory = runs.empty("undisturbed")
    train_generation(directory, job, Layout(WORKERS, ZERO_STAGE), timeout=600)
    return directory


@pytest.fixture
def machines(runs: Runs, job: FinetuneJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with ExitStack() as stack:
        stored = stack.enter_context(buckets.open_bucket("s3"))
        bucket = Bucket(f"{stored.url}/jobs/{tmp_path.name}")
        server = stack.enter_context(UnreliableServer(os.environ["S3_ENDPOINT_URL"]))
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        found = Machines(runs, job, bucket, server, [])
        yield found
        for run in found.made:
            run.clean_up()


def exported(directory: JobDirectory) -> bytes:
    return (directory.export / "model.safetensors").read_bytes()


def checkpoint_problem(run: LiveRun) -> str | None:
    problem: str | None = (files.read_json(run.directory.status) or {}).get("checkpointProblem")
    return problem


def rows(directory: JobDirectory) -> list[tuple[str, float]]:
    """Hash of the rows, and loss, of every step that led to the model."""
    return [(record["samples"], record["loss"]) for record in surviving_steps(directory)]


def test_another_machine_continues_with_the_same_bits(machines: Machines, undisturbed: JobDirectory) -> None:
    first = machines.start()
    machines.wait_for_commits(first, random.randint(8, 24))
    first.kill_everything()
    shutil.rmtree(first.directory.root)
    second = machines.start()
    machines.wait_for_commits(second, 36)
    machines.server.break_connections()
    second.wait_until(lambda: checkpoint_problem(second) is not None, "a problem")
    step = second.last_step()
    second.wait_for_step(min(step + 4, STEPS))
    machines.server.mend()
    code, output = second.wait()
    assert code == 0, output
    assert exported(second.directory) == exported(undisturbed)
    assert rows(second.directory) == rows(undisturbed)


def test_a_second_machine_fences_off_the_first_one(machines: Machines, undisturbed: JobDirectory) -> None:
    older = machines.start()
    machines.wait_for_commits(older, 4)
    newer = machines.start()
    code, output = older.wait()
    assert code == SupersededError.exit_code, output
    assert f"another run of this job has taken over {machines.bucket.url}" in output
    code, output = newer.wait()
    assert code == 0, output
    assert exported(newer.directory) == exported(undisturbed)
    assert rows(newer.directory) == rows(undisturbed)
    state = f"writers/{newest_state(machines.bucket):07d}"
    assert json.loads(machines.bucket.read(f"{state}/status.json") or "{}")["phase"] == "Done"
    assert machines.bucket.read("export/model.safetensors") == exported(undisturbed)
