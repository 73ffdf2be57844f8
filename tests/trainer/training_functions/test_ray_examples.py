"""Ray Train's own examples in ranks: they train through the loss of a rank, and with `spotune_train` exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankExit
from tests.trainer.training_functions.ranks import function_job, run_generation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IMAGES = {"lr": 0.01, "batch_size_per_worker": 16, "every": 3}
PAIRS = {"pairs": 160, "batchSize": 8, "learningRate": 0.002, "zeroStage": 3, "seed": 1, "every": 4}


@dataclass(frozen=True)
class Example:
    """A function of an example, and where it is disturbed.

    Attributes:
        module: of the function.
        function: its name.
        config: its argument.
        kill_at: report before which rank 1 dies.
        resumes_at: step of the checkpoint that training continues from.
        steps: reports of the whole job.
        model: file of the exported model.
    """

    module: str
    function: str
    config: dict[str, Any]
    kill_at: int
    resumes_at: int
    steps: int
    model: str = field(default="", kw_only=True)

    def job(self, happened: Path) -> FinetuneJob:
        config = {
            "module": self.module,
            "function": self.function,
            "config": self.config,
            "killAt": self.kill_at,
            "happened": str(happened),
        }
        return function_job("main", config, module="ray_examples.disturbed")


BY_EPOCHS = (
    Example("ray_examples.fashion_mnist", "train_func_per_worker", {**IMAGES, "epochs": 4}, 3, 2, 4, model="model.pt"),
    Example("ray_examples.lightning_images", "train_func", {"epochs": 4}, 3, 2, 4, model="checkpoint.ckpt"),
)
BY_STEPS = (
    Example("ray_examples.fashion_mnist", "by_steps", {**IMAGES, "epochs": 2}, 12, 9, 16, model="state.pt"),
    Example("ray_examples.lightning_images", "by_steps", {"epochs": 3, "every": 3}, 8, 6, 12, model="lightning.ckpt"),
    Example("ray_examples.accelerate_script", "main", {"epochs": 2, "every": 4}, 18, 16, 22, model="model.safetensors"),
    Example("ray_examples.deepspeed_pairs", "by_steps", {**PAIRS, "epochs": 2}, 15, 12, 20, model="global_step20"),
)


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def trained(directory: JobDirectory, job: FinetuneJob) -> str | None:
    """Run a generation to its end. Returns the checkpoint that it started from."""
    task, results = run_generation(directory, job)
    assert [result[0] for result in results if isinstance(result, tuple)] == [RankExit.TRAINED] * 2, results
    return task.restore


def disturbed(directory: JobDirectory, job: FinetuneJob) -> str | None:
    """Run a generation whose rank 1 is lost, and another one to its end."""
    _, results = run_generation(directory, job)
    assert results[1] == -9, results
    return trained(directory, job)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, or of the files of a folder, by their places in it."""
    if model.is_dir():
        files = {file.name: tensors_of(file) for file in sorted(model.iterdir())}
        return {f"{file} {name}": tensor for file, found in files.items() for name, tensor in found.items()}
    content = load_file(model) if model.suffix == ".safetensors" else torch.load(model, weights_only=False)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(content)
    return {str(place): leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor)}


@pytest.mark.long
@pytest.mark.parametrize("example", BY_EPOCHS, ids=lambda example: example.module)
def test_an_example_of_ray_trains_through_the_loss_of_a_rank(
    directory: JobDirectory, tmp_path: Path, example: Example
) -> None:
    restored = disturbed(directory, example.job(tmp_path / "happened"))
    assert restored == f"step-{example.resumes_at:08}.gen-1"
    assert [line["step"] for line in surviving_steps(directory)] == list(range(1, example.steps + 1))
    assert tensors_of(directory.export / example.model)


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[] if "deepspeed" in each.module else pytest.mark.long) for each in BY_STEPS],
    ids=lambda example: example.module,
)
def test_with_the_library_the_model_is_that_of_an_undisturbed_run(
    directory: JobDirectory, tmp_path: Path, example: Example
) -> None:
    happened, undisturbed = tmp_path / "happened", JobDirectory(tmp_path / "undisturbed")
    assert disturbed(directory, example.job(happened)) == f"step-{example.resumes_at:08}.gen-1"
    assert trained(undisturbed, example.job(happened)) is None, "it is killed once"
    found, expected = (tensors_of(each.export / example.model) for each in (directory, undisturbed))
    assert found
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    steps = surviving_steps(directory)
    assert [line["step"] for line in steps] == list(range(1, example.steps + 1))
    assert [line["loss"] for line in steps] == [line["loss"] for line in surviving_steps(undisturbed)]


def test_what_accelerate_logs_after_a_report_is_part_of_the_next_one(directory: JobDirectory) -> None:
    job = function_job("main", {"epochs": 1, "every": 11}, module="ray_examples.accelerate_script")
    assert trained(directory, job) is None
    metrics = [line["metrics"] for line in surviving_steps(directory)]
    assert [found.get("late") for found in metrics] == [None, *(float(step) for step in range(1, 11))]
