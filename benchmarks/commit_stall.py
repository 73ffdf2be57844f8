"""What a full checkpoint costs the steps of a training run on GPUs, while it is written in the background.

Trains a Llama with random weights on rows of random tokens by the trainer's own worker, with a commit every so many
steps, and compares the steps from the beginning of each commit until it is durable with all others. No Ray: the ranks
come from torchrun.

    torchrun --nproc-per-node 1 benchmarks/commit_stall.py --size 1.1B --output benchmarks/results/commit_stall_1.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming.base.format.mds import MDSWriter
from torch import distributed

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.layout import GenerationLogs, JobDirectory
from spotune_trainer.worker import run_worker
from tests.trainer.runs import Layout, make_task, start_generation
from tests.trainer.tiny import VOCABULARY, make_job, save_source

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "1.1B": {  # TinyLlama's shape
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "3.2B": {  # Llama 3.2's shape, with untied embeddings of a smaller vocabulary
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
WARM_UP_STEPS = 5


def make_inputs(folder: Path, options: argparse.Namespace) -> FinetuneJob:
    """A source, shards, and the job over them."""
    save_source(folder / "source", "causal", **SIZES[options.size])
    samples = 256
    random = np.random.default_rng(0)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
        for _ in range(samples):
            row = random.integers(3, VOCABULARY, options.length, dtype=np.int32)
            writer.write({"input_ids": row, "labels": row})
    return make_job(
        folder / "source",
        "causal",
        model={"dtype": "bfloat16"},
        dataset={"train": {"source": str(folder / "shards")}, "eval": None},
        training={"epochs": None, "maxSteps": options.every * (options.commits + 1), "globalBatchSize": options.batch},
        checkpoint={"every": options.every, "keep": 1},
    )


def cost(logs: GenerationLogs, every: int) -> dict[str, Any]:
    """What commits cost: seconds of the steps they touch above those of a median step that none does."""
    seconds = [record["seconds"] for record in files.read_lines(logs.steps)]
    commits = [event for event in files.read_lines(logs.events) if event["event"] == "committed"]
    commits = [event for event in commits if event["step"] % every == 0 and event["step"] < len(seconds)]
    touched: set[int] = set(range(WARM_UP_STEPS))
    spans = []
    for event in commits:
        span = _steps_within(seconds, event["step"], event["seconds"])
        touched |= set(span)
        spans.append(span)
    free = [value for index, value in enumerate(seconds) if index not in touched]
    usual = statistics.median(free)
    return {
        "commits": len(commits),
        "gigabytes": round(commits[0]["bytes"] / 1e9, 2),
        "stepSeconds": _spread(free),
        "hostStallSeconds": _spread([event["stallSeconds"] for event in commits]),
        "firstStepExtraSeconds": _spread([seconds[span[0]] - usual for span in spans]),
        "allStepsExtraSeconds": _spread([sum(seconds[index] - usual for index in span) for span in spans]),
        "writeSeconds": _spread([event["seconds"] for event in commits]),
        "firstCommit": {"hostStallSeconds": commits[0]["stallSeconds"], "writeSeconds": commits[0]["seconds"]},
    }


def _steps_within(seconds: Sequence[float], first: int, duration: float) -> range:
    """Indices of the steps that ran within `duration` from the end of step `first` (counted from 1)."""
    passed, index = 0.0, first
    while index < len(seconds) and (passed < duration or index == first):
        passed += seconds[index]
        index += 1
    return range(first, index)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "least": round(ordered[0], 4),
        "most": round(ordered[-1], 4),
    }


def main() -> None:
    """Train; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.1B", help="of the model")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, over all GPUs")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--every", type=int, default=40, help="steps between two commits")
    parser.add_argument("--commits", type=int, default=11, help="the first one counts as the others do")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    shared: list[Any] = [None]
    if rank == 0:
        root = Path(tempfile.mkdtemp())
        made = make_inputs(root, options)
        directory = JobDirectory(root / "job")
        directory.root.mkdir()
        layout = Layout(world_size, options.zero_stage)
        shared = [(root, make_task(directory, made, layout, start_generation(directory), options.batch // world_size))]
    distributed.broadcast_object_list(shared)
    root, task = shared[0]
    run_worker(task, rank, world_size)
    if rank == 0:
        directory = JobDirectory(root / "job")
        newest = list_checkpoints(directory.checkpoints)[-1]
        assert isinstance(newest, Checkpoint)
        found = {
            "device": torch.cuda.get_device_name(),
            "worldSize": world_size,
            **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
            "model": options.size,
            "parameters": sum(math.prod(shape) for shape in newest.manifest.parameters.values()),
            "dtype": "bfloat16",
            "zeroStage": options.zero_stage,
            "tokensPerStep": options.batch * options.length,
            **cost(directory.generation_logs(task.generation), options.every),
        }
        result = json.dumps(found, indent=2)
        print(result)
        if options.output:
            options.output.write_text(result + "\n", encoding="utf-8")
        shutil.rmtree(root)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
