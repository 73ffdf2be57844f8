"""Resumes a job directory to its end on one rank without Ray, and prints what came out.

python -m tests.releases.resume DIRECTORY...
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}

import torch

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.export.huggingface import weights_sha256
from spotune_trainer.job_directory.job import job_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import run_worker
from tests.trainer.support.layouts import process_group
from tests.trainer.support.runs import start_generation


def resume(root: Path) -> dict[str, Any]:
    """Train the next generation by the directory's own plan."""
    directory = JobDirectory(root)
    job, plan = job_of(directory), files.read_json(directory.plan)
    assert job is not None
    assert plan is not None
    directory.notice.unlink(missing_ok=True)  # as the supervisor does: it asked the run to stop
    generation = start_generation(directory)
    task = WorkerTask(
        directory=str(directory.root),
        generation=generation.number,
        restore=str(generation.restored) if generation.restored else None,
        job=job.model_dump(mode="json"),
        plan=RunPlan.from_json(plan).to_json(),
    )
    with tempfile.TemporaryDirectory() as store, process_group(0, 1, Path(store) / "store"):
        result = run_worker(task, 0, 1)
    steps = surviving_steps(directory)
    return {
        "restored": task.restore,
        "losses": [step["loss"] for step in steps],
        "samples": [step["samples"] for step in steps],
        "weights": weights_sha256(directory.export),
        "evalLoss": result.summary["evalLoss"],
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps([resume(Path(given)) for given in sys.argv[1:]]))
