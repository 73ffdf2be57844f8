"""The same samples, losses and weights on GPUs: every ZeRO stage, resumed from a checkpoint, at this world size.

Trains a small T5 with dropout for ten steps at each stage and precision, then again from the checkpoint after step
five, and compares: sample hashes with stage 0, losses with stage 0, and parameters bit for bit with the run that was
not interrupted. No Ray: the ranks come from torchrun.

    torchrun --nproc-per-node 2 benchmarks/gpu_exactness.py --output benchmarks/results/gpu_exactness_2.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.generations import choose_checkpoint, surviving_steps
from spotune_trainer.layout import JobDirectory
from spotune_trainer.worker import run_worker
from tests.trainer.runs import Layout, Runs, make_task, start_generation

STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
INTERRUPTED_AFTER = 5


def train(runs: Runs, directory: JobDirectory, layout: Layout, dtype: str) -> None:
    """One generation on all ranks."""
    rank = distributed.get_rank()
    task: list[Any] = [None]
    if rank == 0:
        task = [make_task(directory, runs.job(dtype=dtype), layout, start_generation(directory))]
    distributed.broadcast_object_list(task)
    run_worker(task[0], rank, layout.world_size)
    distributed.barrier()


def final_parameters(directory: JobDirectory) -> dict[str, torch.Tensor]:
    """What the newest checkpoint holds."""
    checkpoint = choose_checkpoint(directory).checkpoint
    assert isinstance(checkpoint, Checkpoint)
    return read_parameters(checkpoint)


def compare(runs: Runs, layout: Layout, dtype: str, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Train, interrupt, train again; what was found."""
    directory = JobDirectory(runs.root / f"{dtype}-{layout.zero_stage}")
    directory.root.mkdir(exist_ok=True)
    train(runs, directory, layout, dtype)
    whole, parameters = surviving_steps(directory), final_parameters(directory)
    distributed.barrier()
    if distributed.get_rank() == 0:
        for path in directory.checkpoints.iterdir():
            if CheckpointName.parse(path.name).step > INTERRUPTED_AFTER:
                shutil.rmtree(path)
    train(runs, directory, layout, dtype)
    again, resumed = surviving_steps(directory), final_parameters(directory)
    reference[:] = reference or whole
    pairs = list(zip(reference, whole, strict=True))
    return {
        "dtype": dtype,
        "zeroStage": layout.zero_stage,
        "sameSamplesAsStage0": all(a["samples"] == b["samples"] for a, b in pairs),
        "largestRelativeLossDifferenceFromStage0": max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs),
        "resumedSamplesEqual": [r["samples"] for r in whole] == [r["samples"] for r in again],
        "resumedLossesEqual": [r["loss"] for r in whole] == [r["loss"] for r in again],
        "resumedParametersBitEqual": all(torch.equal(parameters[name], resumed[name]) for name in parameters),
    }


def main() -> None:
    """Compare all layouts at this world size; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    runs = Runs(Path(folder[0]))
    if distributed.get_rank() == 0:
        runs.job()
    distributed.barrier()
    layouts = []
    for dtype in DTYPES:
        reference: list[dict[str, Any]] = []
        world_size = distributed.get_world_size()
        layouts += [compare(runs, Layout(world_size, stage), dtype, reference) for stage in STAGES]
    if distributed.get_rank() == 0:
        machine = {
            "device": torch.cuda.get_device_name(),
            "worldSize": distributed.get_world_size(),
            **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
        }
        result = json.dumps({"machine": machine, "layouts": layouts}, indent=2)
        print(result)
        if options.output:
            options.output.write_text(result + "\n", encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
