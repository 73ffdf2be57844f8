"""Plain DeepSpeed engines, as users of DeepSpeed build them, and universal checkpoints exchanged with ours."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from torch import distributed

from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.export.import_universal import import_universal_checkpoint
from spotune_trainer.export.universal import write_universal
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.layouts import (
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
from tests.trainer.support.tiny import make_job

STAGES = (1, 2, 3)
WEIGHT_DECAYS = [0.1, 0.0]


def plain_engine(layout: Layout) -> Any:
    """An engine from `deepspeed.initialize`, with two parameter groups and one of DeepSpeed's schedulers."""
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


def differences_when_deepspeed_loads_ours(rank: int, world_size: int, root: Path, dtype: str) -> dict[int, list[str]]:
    """Names of the states that differ, by stage, when DeepSpeed loads a checkpoint of ours from another stage."""
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
        engine = plain_engine(Layout(stage, world_size, dtype))
        path, _ = engine.load_checkpoint(str(root / "universal"))
        assert path is not None
        found[stage] = differences(engine, expected)
        assert engine.global_steps == ours.steps
        assert engine.lr_scheduler.last_batch_iteration == ours.steps - 1
        assert [group["weight_decay"] for group in engine.basic_optimizer.param_groups] == WEIGHT_DECAYS
    return found


def differences_when_we_load_deepspeeds(rank: int, world_size: int, root: Path, stage: int) -> list[str]:
    """Names of the states that differ when our engine starts from a universal checkpoint of DeepSpeed's."""
    engine, steps = plain_engine(Layout(stage, world_size, "bfloat16")), 2
    train(engine, steps)
    expected = state_of(engine)
    engine.save_checkpoint(str(root), tag="saved")
    distributed.barrier()
    directory = JobDirectory(root / "run")
    if rank == 0:
        make_universal(root / "saved", root / "universal")
        model_config().save_pretrained(root / "model")
        import_universal_checkpoint(directory, make_job(root / "model", "causal"), root / "universal")
    distributed.barrier()
    engine = build(Layout(2, world_size, "bfloat16"), frozen=())
    restore(engine, opened(directory, CheckpointName(steps, 0)))
    return differences(engine, expected)


def make_universal(source: Path, output: Path) -> None:
    """`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(source), "output_folder": str(output)}
    ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))
