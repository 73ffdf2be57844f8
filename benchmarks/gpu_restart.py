"""Measures how long a worker on a GPU takes to start: the first one of a node, and those that replace it after a kill.

Forks ranks from a fork server with everything imported, as the node agent does (see docs/adr/0018-ranks-are-forked.md).
Each rank starts from the checkpoint of the previous one, which is killed after its commit. Does not use Ray.

    python -m benchmarks.gpu_restart --size 1.1B --output benchmarks/results/gpu_restart.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankPlacement
from spotune_trainer.worker_group.rank_process import Assignment, run_rank
from tests.provenance import commit
from tests.trainer.support.measured import LLAMAS, make_llama_job
from tests.trainer.support.runs import Layout, make_task, start_generation

_FORKING = multiprocessing.get_context("forkserver")
_PATIENCE_SECONDS = 100.0


def generation(directory: JobDirectory, job: FinetuneJob, micro_batch_size: int) -> dict[str, Any]:
    """Start a rank and kill it after its first commit; returns the seconds to its first step, by part."""
    started = time.monotonic()
    task = make_task(directory, job, Layout(1, 1), start_generation(directory), micro_batch_size)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    _ours, theirs = _FORKING.Pipe()
    assignment = Assignment(task, RankPlacement(0, 0, 1, 1, "127.0.0.1", port), memory=None, keep=False)
    process = _FORKING.Process(target=run_rank, args=(theirs, assignment))
    process.start()
    try:
        wait_until(lambda: any(files.read_lines(task.logs.steps)), process)
        seconds = time.monotonic() - started
        wait_until(lambda: any(event["event"] == "committed" for event in files.read_lines(task.logs.events)), process)
    except AssertionError:
        print(task.logs.worker(0).read_text())
        raise
    finally:
        process.kill()
        process.join()
    parts = (files.read_json(task.logs.progress) or {})["startup"]
    found = {"restored": task.restore is not None, "firstStepSeconds": round(seconds, 2), "parts": parts}
    print(json.dumps(found), flush=True)
    return found


def wait_until(done: Callable[[], bool], process: Any) -> None:
    """Wait until a process has caused a condition."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while not done():
        assert process.is_alive(), f"the rank ended with {process.exitcode}"
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="size of the model")
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--every", type=int, default=10, help="steps between two commits")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    try:
        job = make_llama_job(root, options.size, options.batch, options.length, every=options.every, keep=1)
        directory = JobDirectory(root / "job")
        directory.root.mkdir()
        print(f"the model and its data are in {root}", flush=True)
        _FORKING.set_forkserver_preload(["spotune_trainer.worker_group.forkserver_preload"])
        forkserver.ensure_running()
        runs = [generation(directory, job, options.batch) for _ in range(options.kills + 1)]
        found = {
            "commit": commit(),
            **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
            "model": options.size,
            "cold": runs[0],
            "restarts": runs[1:],
        }
    finally:
        shutil.rmtree(root)
    result = json.dumps(found, indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
