"""Universal checkpoints: DeepSpeed's own engine loads what we convert, and ours what DeepSpeed has converted."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from torch import distributed

from spotune.errors import JobError
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.universal import LATEST, open_universal, write_universal
from spotune_trainer.first_checkpoint import begin_from_universal
from spotune_trainer.layout import JobDirectory
from tests.trainer.checkpoints import SHAPES, make_state, put_checkpoint
from tests.trainer.groups import run_group
from tests.trainer.layouts import (
    DTYPES,
    Layout,
    build,
    build_model,
    differences,
    model_config,
    opened,
    restore,
    save,
    state_of,
    train,
)
from tests.trainer.tiny import make_job

STAGES = (1, 2, 3)
WORLD_SIZE = 2
WEIGHT_DECAYS = [0.1, 0.0]


def foreign_engine(layout: Layout) -> Any:
    """What somebody else trains with DeepSpeed: two parameter groups and one of DeepSpeed's schedulers."""
    model = build_model(DTYPES[layout.dtype], frozen=())
    kinds = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    groups = [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, WEIGHT_DECAYS, strict=True)]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": layout.dtype == "bfloat16"},
            "zero_optimization": {"stage": layout.stage, "reduce_bucket_size": 1000},
            "zero_force_ds_cpu_optimizer": False,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
            "checkpoint": {"load_universal": True},
        },
    )
    return engine


def loaded_by_deepspeed(rank: int, world_size: int, root: Path, dtype: str) -> dict[int, list[str]]:
    """What differs, by stage, when DeepSpeed loads what one of our engines has committed at another stage."""
    ours = Layout(3, world_size, dtype)
    engine, directory, name = build(ours, frozen=()), JobDirectory(root / "run"), CheckpointName(ours.steps, 1)
    train(engine, ours.steps)
    save(engine, directory, name)
    expected = state_of(engine)
    if rank == 0:
        write_universal(opened(directory, name), root / "universal" / "step")
    distributed.barrier()
    found = {}
    for stage in STAGES:
        engine = foreign_engine(Layout(stage, world_size, dtype))
        path, _ = engine.load_checkpoint(str(root / "universal"))
        assert path is not None
        found[stage] = differences(engine, expected)
        assert engine.global_steps == ours.steps
        assert engine.lr_scheduler.last_batch_iteration == ours.steps - 1
        assert [group["weight_decay"] for group in engine.basic_optimizer.param_groups] == WEIGHT_DECAYS
    return found


def converted_by_deepspeed(rank: int, world_size: int, root: Path, stage: int) -> list[str]:
    """What differs when one of our engines begins from what DeepSpeed saved and made universal."""
    engine, steps = foreign_engine(Layout(stage, world_size, "bfloat16")), 2
    train(engine, steps)
    expected = state_of(engine)
    engine.save_checkpoint(str(root), tag="saved")
    distributed.barrier()
    directory = JobDirectory(root / "run")
    if rank == 0:
        make_universal(root / "saved", root / "universal")
        model_config().save_pretrained(root / "model")
        begin_from_universal(directory, make_job(root / "model", "causal"), root / "universal")
    distributed.barrier()
    engine = build(Layout(2, world_size, "bfloat16"), frozen=())
    restore(engine, opened(directory, CheckpointName(steps, 0)))
    return differences(engine, expected)


def make_universal(source: Path, output: Path) -> None:
    """`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(source), "output_folder": str(output)}
    ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_loads_what_we_convert(tmp_path: Path, dtype: str) -> None:
    found = run_group(WORLD_SIZE, loaded_by_deepspeed, tmp_path, dtype)
    assert found == [{stage: [] for stage in STAGES}] * WORLD_SIZE


@pytest.mark.parametrize("stage", STAGES)
def test_we_begin_from_what_deepspeed_converts(tmp_path: Path, stage: int) -> None:
    assert run_group(WORLD_SIZE, converted_by_deepspeed, tmp_path, stage) == [[]] * WORLD_SIZE


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    """A universal checkpoint of two parameters after three steps."""
    directory = JobDirectory(tmp_path / "run")
    name = put_checkpoint(directory, 3, 1, world_size=3, state=make_state())
    write_universal(opened(directory, name), tmp_path / "universal" / "step-3")
    return tmp_path / "universal" / "step-3"


def test_each_state_of_each_parameter_is_a_file_with_its_shape(universal: Path) -> None:
    value = torch.load(universal / "zero" / "layer.weight" / "exp_avg.pt")
    assert torch.equal(value["param"], make_state()["layer.weight/exp_avg"].view(5, 7))
    assert torch.load(universal / "zero" / "layer.bias" / "step.pt") == 3
    assert (universal.parent / LATEST).read_text() == "step-3"
    assert sorted(path.name for path in universal.parent.iterdir()) == [LATEST, "step-3"]


def test_progress_is_told_parameter_by_parameter(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    told: list[tuple[int, int]] = []
    write_universal(opened(directory, put_checkpoint(directory, 3, 1)), tmp_path / "u", lambda *at: told.append(at))
    assert told == [(35 * 12, 38 * 12), (38 * 12, 38 * 12)]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "run")
    checkpoint = opened(directory, put_checkpoint(directory, 3, 1, world_size=2))

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_universal(checkpoint, tmp_path / "universal" / "step-3", stop)
    assert list((tmp_path / "universal").iterdir()) == []


def test_what_is_read_is_what_was_written(universal: Path) -> None:
    found = open_universal(universal, SHAPES)
    assert (found.step, found.optimizer_step) == (3, 3)


def test_a_folder_without_states_is_no_universal_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"is no universal checkpoint of DeepSpeed: there is no zero/optimizer"):
        open_universal(tmp_path, SHAPES)


def test_a_missing_parameter_is_named(universal: Path) -> None:
    with pytest.raises(JobError, match=r"zero/layer\.scale/fp32\.pt is missing: the checkpoint is not of the job's"):
        open_universal(universal, {**SHAPES, "layer.scale": (3,)})


def test_another_shape_is_named(universal: Path) -> None:
    with pytest.raises(JobError, match=r"layer\.bias/fp32\.pt has shape \[3\], but the job's model has \[4\] there"):
        open_universal(universal, {**SHAPES, "layer.bias": (4,)})


def test_a_file_without_a_tensor_is_named(universal: Path) -> None:
    torch.save({"vocab_tensor": True}, universal / "zero" / "layer.weight" / "exp_avg.pt")
    with pytest.raises(JobError, match=r"exp_avg\.pt holds no tensor"):
        open_universal(universal, SHAPES)


def test_a_file_that_is_cut_short_is_named(universal: Path) -> None:
    file = universal / "zero" / "layer.weight" / "exp_avg_sq.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JobError, match=r"exp_avg_sq\.pt cannot be read"):
        open_universal(universal, SHAPES)


def test_nothing_in_a_file_is_executed(universal: Path) -> None:
    """A pickle may call anything; these come from elsewhere."""
    torch.save({"param": Path("/")}, universal / "zero" / "layer.weight" / "fp32.pt")
    with pytest.raises(JobError, match=r"fp32\.pt cannot be read: Weights only load failed"):
        open_universal(universal, SHAPES)
