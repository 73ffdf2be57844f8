"""Universal checkpoints: DeepSpeed loads those that spotune writes, and spotune those that DeepSpeed converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from spotune.errors import JobError
from spotune_trainer.export.universal import LATEST, open_universal, write_universal
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import SHAPES, commit_checkpoint, make_state
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import opened
from tests.trainer.support.plain_deepspeed import (
    STAGES,
    differences_when_deepspeed_loads_ours,
    differences_when_we_load_deepspeeds,
)

WORLD_SIZE = 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_loads_a_written_universal_checkpoint(tmp_path: Path, dtype: str) -> None:
    found = run_group(WORLD_SIZE, differences_when_deepspeed_loads_ours, tmp_path, dtype)
    assert found == [{stage: [] for stage in STAGES}] * WORLD_SIZE


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_starts_from_a_checkpoint_converted_by_deepspeed(tmp_path: Path, stage: int) -> None:
    assert run_group(WORLD_SIZE, differences_when_we_load_deepspeeds, tmp_path, stage) == [[]] * WORLD_SIZE


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    """A universal checkpoint of two parameters after three steps."""
    directory = JobDirectory(tmp_path / "run")
    name = commit_checkpoint(directory, 3, 1, world_size=3, state=make_state())
    write_universal(opened(directory, name), tmp_path / "universal" / "step-3")
    return tmp_path / "universal" / "step-3"


def test_each_state_of_each_parameter_is_a_file_with_its_shape(universal: Path) -> None:
    value = torch.load(universal / "zero" / "layer.weight" / "exp_avg.pt")
    assert torch.equal(value["param"], make_state()["layer.weight/exp_avg"].view(5, 7))
    assert torch.load(universal / "zero" / "layer.bias" / "step.pt") == 3
    assert (universal.parent / LATEST).read_text() == "step-3"
    assert sorted(path.name for path in universal.parent.iterdir()) == [LATEST, "step-3"]


def test_progress_is_reported_after_each_parameter(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    reports: list[tuple[int, int]] = []
    write_universal(
        opened(directory, commit_checkpoint(directory, 3, 1)), tmp_path / "u", lambda *at: reports.append(at)
    )
    assert reports == [(35 * 12, 38 * 12), (38 * 12, 38 * 12)]


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "run")
    checkpoint = opened(directory, commit_checkpoint(directory, 3, 1, world_size=2))

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_universal(checkpoint, tmp_path / "universal" / "step-3", stop)
    assert list((tmp_path / "universal").iterdir()) == []


def test_written_states_are_read_back(universal: Path) -> None:
    found = open_universal(universal, SHAPES)
    assert (found.step, found.optimizer_step) == (3, 3)


def test_a_folder_without_states_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"is not a universal checkpoint of DeepSpeed: it has no zero/optimizer"):
        open_universal(tmp_path, SHAPES)


def test_error_names_a_missing_parameter(universal: Path) -> None:
    with pytest.raises(JobError, match=r"zero/layer\.scale/fp32\.pt is missing: the checkpoint is incomplete"):
        open_universal(universal, {**SHAPES, "layer.scale": (3,)})


def test_error_names_a_parameter_with_another_shape(universal: Path) -> None:
    with pytest.raises(JobError, match=r"layer\.bias/fp32\.pt has shape \[3\], but the job's model has \[4\] there"):
        open_universal(universal, {**SHAPES, "layer.bias": (4,)})


def test_error_names_a_file_without_a_tensor(universal: Path) -> None:
    torch.save({"vocab_tensor": True}, universal / "zero" / "layer.weight" / "exp_avg.pt")
    with pytest.raises(JobError, match=r"exp_avg\.pt has no tensor"):
        open_universal(universal, SHAPES)


def test_error_names_a_truncated_file(universal: Path) -> None:
    file = universal / "zero" / "layer.weight" / "exp_avg_sq.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JobError, match=r"exp_avg_sq\.pt cannot be read"):
        open_universal(universal, SHAPES)


def test_no_code_in_a_file_is_executed(universal: Path) -> None:
    """A pickle can call any function, and these files come from outside."""
    torch.save({"param": Path("/")}, universal / "zero" / "layer.weight" / "fp32.pt")
    with pytest.raises(JobError, match=r"fp32\.pt cannot be read: Weights only load failed"):
        open_universal(universal, SHAPES)


class Attribute:
    """Pickled as `getattr(owner, name)`, as Python 3.11.0 to 3.11.3 do with members of enumerations."""

    def __init__(self, owner: Any, name: str) -> None:
        self.of = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.of


@pytest.mark.parametrize("attribute", [Attribute(LossScaler, "__init__"), Attribute(torch.Tensor, "share_memory_")])
def test_only_zero_stages_are_unpickled_as_attributes(universal: Path, attribute: Attribute) -> None:
    file = universal / "zero" / next(iter(SHAPES)) / "fp32.pt"
    values = torch.load(file, weights_only=True)
    torch.save({**values, "stage": Attribute(ZeroStageEnum, "weights")}, file)
    open_universal(universal, SHAPES)
    torch.save({**values, "stage": attribute}, file)
    with pytest.raises(JobError, match=r"fp32\.pt cannot be read"):
        open_universal(universal, SHAPES)
