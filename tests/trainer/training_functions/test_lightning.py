"""Lightning in ranks: a lost rank changes no bit of the trained model."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit
from tests.trainer.training_functions.ranks import function_job, run_disturbed, run_generation

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def lightning_job(config: dict[str, Any]) -> FinetuneJob:
    return function_job("trains", {"epochs": 3, "every": 4, **config}, module="lightning_functions")


def weights_of(directory: JobDirectory) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(directory.export / "lightning.ckpt")["state_dict"]
    return weights


@pytest.mark.parametrize(
    ("config", "kill_at", "resumes_at", "total"),
    [
        ({}, 19, 16, 33),
        pytest.param({}, 13, 12, 33, marks=pytest.mark.long),
        ({"accumulate": 2, "every": 2}, 8, 7, 18),
        pytest.param({"processes": 1}, 19, 16, 33, marks=pytest.mark.long),
        pytest.param({"package": "pytorch_lightning"}, 19, 16, 33, marks=pytest.mark.long),
        pytest.param({"samples": True}, 19, 16, 33, marks=pytest.mark.long),
    ],
    ids=["epoch 2", "after the first epoch", "accumulated", "worker processes", "pytorch_lightning", "samples"],
)
def test_model_after_a_loss_in_an_epoch_is_that_of_an_undisturbed_run(
    directory: JobDirectory, tmp_path: Path, config: dict[str, Any], kill_at: int, resumes_at: int, total: int
) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    _, results = run_generation(undisturbed, lightning_job(config))
    assert [result[0] for result in results] == [RankExit.TRAINED] * 2, results
    job = lightning_job({**config, "killAt": kill_at, "happened": str(tmp_path / "happened")})
    _, results = run_generation(directory, job)
    assert results[1] == -9
    task, results = run_generation(directory, job)
    assert [result[0] for result in results] == [RankExit.TRAINED] * 2, results
    assert task.restore == f"step-{resumes_at:08}.gen-1"
    expected = weights_of(undisturbed)
    for name, tensor in weights_of(directory).items():
        assert torch.equal(tensor, expected[name]), name
    steps = surviving_steps(directory)
    assert [line["step"] for line in steps] == list(range(1, total + 1))
    assert [(line["loss"], line["metrics"]) for line in steps] == [
        (line["loss"], line["metrics"]) for line in surviving_steps(undisturbed)
    ]
    progress = files.read_json(task.logs.progress)
    assert progress is not None
    assert (progress["totalSteps"], progress["etaSeconds"]) == (total, 0.0)


@pytest.mark.long
def test_at_a_notice_the_last_step_is_saved(directory: JobDirectory) -> None:
    def notice_later() -> None:
        logs = directory.generation_logs(1)
        while not logs.steps.exists():
            time.sleep(0.05)
        write_notice(logs.notice, seconds=60.0, reason="a test", stop=False, leave=True)

    job = lightning_job({"epochs": 100_000, "every": 1_000_000})
    task, results = run_disturbed(directory, job, notice_later)
    assert [result[0] for result in results] == [RankExit.YIELDED] * 2
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    assert list(files.read_lines(task.logs.steps))[-1]["step"] == checkpoint.name.step


@pytest.mark.parametrize(
    ("module", "hidden", "message"),
    [
        ("lightning", ("lightning", "pytorch_lightning"), "install the package lightning (pip install lightning)"),
        (
            "accelerate",
            ("accelerate", "accelerate.tracking"),
            "install the package accelerate (pip install accelerate)",
        ),
    ],
)
def test_a_library_that_is_not_installed_is_named(module: str, hidden: tuple[str, ...], message: str) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); import spotune_train.{module}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert message in ran.stderr.splitlines()[-1]
