"""The examples of training functions by `spotune run`: the loss of a worker and of the head, and the same model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

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


def test_rays_example_of_deepspeed_reports_f1_through_the_loss_of_a_worker(tmp_path: Path) -> None:
    example = ROOT / "examples" / "ray-deepspeed"
    run = LiveRun(JobDirectory(tmp_path / "run"), resolve_paths(load_job(example / "finetunejob.yaml"), example))
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    run_generation(undisturbed, run.job)
    try:
        run.start()
        run.wait_for_step(1)
        kill(run.ranks()[1])
        code, output = run.wait()
    finally:
        run.clean_up()

    assert code == 0, output
    assert [failure["cause"] for failure in run.events("failure")] == ["workerLost"]
    epochs = run.job.spec.training.config["epochs"]
    steps = surviving_steps(run.directory)
    assert [line["step"] for line in steps] == list(range(1, epochs + 1))
    assert steps[-1]["metrics"]["f1"] > 0.9
    page = report_of_directory(run.directory.root)
    assert ">f1<" in page, "a curve of what the function reports"
    folders = (run.directory.export, undisturbed.export)
    weights, expected = (get_fp32_state_dict_from_zero_checkpoint(str(folder)) for folder in folders)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
