"""The example of a training function by `spotune run`: the loss of a worker and of the head, and the same model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.job_file.load import load_job, replace_fields, resolve_paths
from spotune_trainer.checkpoint.generations import latest_generation, surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.report.page import report_of_directory
from tests import ROOT
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.training_functions.ranks import run_generation

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "own-function"
EPOCHS = 60


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    job = resolve_paths(load_job(EXAMPLE / "finetunejob.yaml"), EXAMPLE)
    changes = {"spec.training.config": {**job.spec.training.config, "epochs": EPOCHS, "images": 16_384}}
    made = LiveRun(JobDirectory(tmp_path / "run"), replace_fields(job, changes))
    yield made
    made.clean_up()


def test_the_example_trains_through_the_loss_of_a_worker_and_of_the_head(run: LiveRun, tmp_path: Path) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    run_generation(undisturbed, run.job)

    run.start()
    run.wait_for_step(5)
    kill(run.ranks()[1])
    run.wait_until(lambda: latest_generation(run.directory) == 2, "another worker group")
    run.wait_for_step(10)
    ranks = run.ranks()
    run.kill_ray()
    run.wait_until(lambda: len(run.events("adopted")) == 1, "another head, under which the same ranks train on")
    assert run.ranks() == ranks, "the test is too short: the group has ended"
    code, output = run.wait()

    assert code == 0, output
    assert latest_generation(run.directory) == 2
    assert [failure["cause"] for failure in run.events("failure")] == ["workerLost", "headLost"]
    assert [line["step"] for line in surviving_steps(run.directory)] == list(range(1, EPOCHS + 1))
    assert (run.directory.export / "state.pt").read_bytes() == (undisturbed.export / "state.pt").read_bytes()
    page = report_of_directory(run.directory.root)
    assert "train:train" in page
    assert ">epoch<" in page, "a curve of what the function reports"
    assert "microBatchSize" not in page
