"""Training functions of the tests. Ranks import them from this folder, as `functions:NAME`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
import ray.train.torch
import torch
from torch import distributed


def adds_up(config: dict[str, Any]) -> None:
    """Each step adds a number that all ranks agree on to the state; a checkpoint every `every` steps on all ranks.

    `killAt` ends rank 1 after a step, in the first generation only. With `rereads`, rank 0 looks for the files of all
    ranks in the last checkpoint. With `waitsFor`, training goes on after a checkpoint once there is such a file.
    """
    context = ray.train.get_context()
    rank = context.get_world_rank()
    step, total, restored_from = 0, 0.0, None
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = json.loads((Path(folder) / "state.json").read_text())
        step, total = state["step"], state["total"]
        restored_from = step
    while step < config["steps"]:
        step += 1
        added = torch.tensor([float(step * (rank + 1))])
        distributed.all_reduce(added)
        total += added.item()
        if step == config.get("killAt") and rank == 1 and restored_from is None:
            os.kill(os.getpid(), signal.SIGKILL)
        metrics = {"loss": 1.0 / step, "accuracy": total, "name": "not a number", "ignored": float("nan")}
        if step % config["every"]:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps({"step": step, "total": total}))
            (Path(folder) / "shards").mkdir()
            (Path(folder) / "shards" / f"rank-{rank}.bin").write_bytes(bytes([rank]) * 1000)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        while "waitsFor" in config and not Path(config["waitsFor"]).exists():
            time.sleep(0.05)
    if config.get("rereads") and rank == 0:
        newest = ray.train.get_checkpoint()
        assert newest is not None
        found = sorted(path.name for path in Path(newest.path).glob("shards/*.bin"))
        assert found == [f"rank-{each}.bin" for each in range(context.get_world_size())]
    sys.stdout.write(f"rank {rank} of {context.get_world_size()} ends at {total}\n")


def reports_nothing() -> None:
    """Takes no argument, and returns without a checkpoint."""


def reports_metrics_only(config: dict[str, Any]) -> None:
    ray.train.report({"loss": 1.0})


def raises(config: dict[str, Any]) -> None:
    raise ValueError("the learning rate is a word")


def meets_a_bad_gpu(config: dict[str, Any]) -> None:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


def asks_for_ray_data(config: dict[str, Any]) -> None:
    ray.train.get_dataset_shard("train")


def collects(config: dict[str, Any]) -> None:
    """Reports what Ray Train says of the worker group."""
    context = ray.train.get_context()
    found = {
        "name": context.get_experiment_name(),
        "rank": context.get_world_rank(),
        "localRank": context.get_local_rank(),
        "worldSize": context.get_world_size(),
        "device": str(ray.train.torch.get_device()),
        "fromRankZero": ray.train.collective.broadcast_from_rank_zero({"rank": context.get_world_rank()}),
        "isMainThread": threading.current_thread() is threading.main_thread(),
    }
    ray.train.collective.barrier()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"rank-{context.get_world_rank()}.json").write_text(json.dumps(found))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def opens_a_missing_file(config: dict[str, Any]) -> None:
    Path("/nonexistent/rows.csv").read_text()


def validates(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").touch()
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder), validation=True)


def returns_early_on_rank_1(config: dict[str, Any]) -> None:
    if ray.train.get_context().get_world_rank() == 0:
        ray.train.report({"loss": 1.0})


def saves_a_forbidden_name_on_rank_1(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = "manifest.json" if ray.train.get_context().get_world_rank() == 1 else "state.json"
        (Path(folder) / name).write_text("{}")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def saves_links(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "elsewhere").mkdir()
        (Path(folder) / "elsewhere" / "file").write_text("content")
        saved = Path(folder) / "saved"
        saved.mkdir()
        (saved / "linked").symlink_to(Path(folder) / "elsewhere")
        (saved / "file").symlink_to(Path(folder) / "elsewhere" / "file")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(str(saved)))
