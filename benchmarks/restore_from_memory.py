"""Measures how long a worker group takes to load its checkpoint: from shared memory, and from the volume, in one run.

Worker groups of two CPU ranks train a Llama of random weights at ZeRO-2. Each group starts from the last commit of the
one before, makes a step, commits and leaves. The groups take turns in where they load from:

* memory: shared memory of the node, as after a lost process;
* page cache: the volume, whose files this machine has just written, so that its page cache has them;
* disk: the volume, after the files were dropped from the page cache, as on another machine.

The time is the part `restore` of a group's start: reading, verifying and publishing the weights to the model. The
volume is a local disk.

    python -m benchmarks.restore_from_memory --output benchmarks/results/restore_from_memory.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, latest_generation
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from tests.trainer.support.measured import LLAMAS, make_llama_job, publish
from tests.trainer.support.runs import Layout, train_generation

LAYOUT = Layout(2, 2)
SOURCES = ("memory", "page cache", "disk")
MODEL = LLAMAS["small"] | {"num_hidden_layers": 12}


def measure(root: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each group by source, and what was loaded."""
    LLAMAS["measured"] = MODEL
    job = make_llama_job(root, "measured", batch=2, length=32, sections={"workers": {"count": 2, "gpus": 0}}, keep=1)
    directory, memory = JobDirectory(root / "job"), NodeMemory()
    directory.root.mkdir()
    write_notice(directory.notice, seconds=60, stop=True, reason="each group makes one step")
    train_generation(directory, job, LAYOUT, micro_batch_size=1, timeout=600, memory=memory)
    seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
    loaded: Mapping[str, Any] = {}
    for number in range(rounds * len(SOURCES)):
        source = SOURCES[number % len(SOURCES)]
        if source != "memory":
            memory.free()
        if source == "disk":
            drop_from_page_cache(directory)
        train_generation(directory, job, LAYOUT, micro_batch_size=1, timeout=600, memory=memory)
        logs = directory.generation_logs(latest_generation(directory))
        loaded = next(event for event in files.read_lines(logs.events) if event["event"] == "restored")
        assert (loaded["volumeBytes"] == 0) == (source == "memory"), loaded
        seconds[source].append((files.read_json(logs.progress) or {})["startup"]["restore"])
        print(source, seconds[source][-1], flush=True)
    return {
        "stateBytes": loaded["memoryBytes"] + loaded["volumeBytes"],
        "restoreSeconds": {source: [round(each, 3) for each in found] for source, found in seconds.items()},
        "medianSeconds": {source: round(statistics.median(found), 3) for source, found in seconds.items()},
    }


def drop_from_page_cache(directory: JobDirectory) -> None:
    """Drop the newest checkpoint, which is durable, from the page cache of this machine."""
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    for entry in checkpoint.manifest.files:
        with (checkpoint.path / entry.name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="groups for each source")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rounds)
    machine = describe_machine("torch", "deepspeed", "transformers")
    publish({"machine": machine, **measured}, options.output)


if __name__ == "__main__":
    main()
