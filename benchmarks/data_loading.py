"""Compares the samples per second of spotune's data loader with MosaicML's ``StreamingDataLoader`` at its defaults.

Both read the same local shards in one process, with the same batch size, shuffle and collate function, one epoch per
round. The rounds alternate and the medians are compared. Without ``--shards``, random rows like those of the
text-to-SQL example are written first.

    python -m benchmarks.data_loading --output benchmarks/results/data_loading.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from spotune_trainer.data.batches import collate
from spotune_trainer.data.loader import MicroBatchLoader
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from tests.provenance import commit

MICRO_BATCHES_PER_STEP = 3


def write_rows(folder: Path, samples: int) -> None:
    """Rows of 30 to 60 input tokens and 10 to 30 labels, as short as questions and their SQL."""
    generator = np.random.default_rng(0)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32", "completion": "str", "database": "str"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh3_64"], size_limit=1 << 23) as writer:
        for number in range(samples):
            row = {
                name: generator.integers(0, 1000, generator.integers(*bounds), dtype=np.int32)
                for name, bounds in {"input_ids": (30, 61), "labels": (10, 31)}.items()
            }
            text = {"completion": "SELECT COUNT(name) FROM data WHERE age > 30", "database": f"table_{number % 90}"}
            writer.write(row | text)


def through_spotune(shards: Path, batch_size: int, epoch: int) -> int:
    """Read one epoch with spotune's loader; returns the number of samples."""
    with ShardedDataset(str(shards), shards / "unused") as dataset:
        schedule = SampleSchedule(dataset.shard_sizes, MICRO_BATCHES_PER_STEP * batch_size, seed=42)
        steps = schedule.steps_per_epoch
        loader = MicroBatchLoader(
            dataset, schedule, "seq2seq", 0, batch_size, first_step=epoch * steps, last_step=(epoch + 1) * steps
        )
        return sum(len(batch.sample_ids) for step in loader for _, batch in step)


def through_streaming(shards: Path, batch_size: int, epoch: int) -> int:
    """Read one epoch with MosaicML's loader; returns the number of samples."""

    def collate_rows(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collate(rows, "seq2seq", 0).model_inputs()

    dataset = StreamingDataset(local=str(shards), shuffle=True, batch_size=batch_size, shuffle_seed=42 + epoch)
    loader = StreamingDataLoader(dataset, batch_size=batch_size, collate_fn=collate_rows)
    return sum(len(batch["input_ids"]) for batch in loader)


def samples_per_second(read: Callable[[Path, int, int], int], shards: Path, batch_size: int, epoch: int) -> float:
    """Samples per second of one epoch, including set-up."""
    begun = time.perf_counter()
    samples = read(shards, batch_size, epoch)
    return samples / (time.perf_counter() - begun)


def measure(shards: Path, batch_size: int, rounds: int) -> dict[str, Any]:
    """Samples per second of all rounds, the medians, and their ratio."""
    readers = {"spotune": through_spotune, "streaming": through_streaming}
    speeds: dict[str, list[float]] = {name: [] for name in readers}
    for epoch in range(rounds):
        for name, read in readers.items():
            speeds[name].append(round(samples_per_second(read, shards, batch_size, epoch)))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    index = json.loads((shards / "index.json").read_text())["shards"]
    return {
        "samples": sum(shard["samples"] for shard in index),
        "shards": len(index),
        "batchSize": batch_size,
        "samplesPerSecond": speeds,
        "median": medians,
        "ratio": round(medians["spotune"] / medians["streaming"], 2),
    }


def machine() -> dict[str, Any]:
    """The machine and the software versions."""
    processor = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    packages = ("mosaicml-streaming", "torch", "numpy")
    return {
        "commit": commit(),
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, help="folder of tokenized shards (default: random rows)")
    parser.add_argument("--samples", type=int, default=30_000, help="number of random rows")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        shards = arguments.shards or Path(temporary) / "shards"
        if arguments.shards is None:
            write_rows(shards, arguments.samples)
        result = measure(shards, arguments.batch_size, arguments.rounds)
    text = json.dumps({"machine": machine(), **result}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
