r"""Profiles one training step on a GPU, after a warm-up, and writes the table of its kernels as JSON.

The step is that of `throughput.py`: the trainer's own worker on random weights and rows. torch.profiler records it with
the shapes of all operators. The loss and the optimizer step are marked. What the table has is in `kernel_table.py`,
which also makes it a page.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/step_profile.py --output benchmarks/results/step_profile.json \
        '{"size": "1.1B", "length": 2048, "microBatch": 16, "batch": 64, "zeroStage": 1, "compile": true}' \
        '{"size": "8B", "length": 4096, "microBatch": 2, "batch": 16, "zeroStage": 1, "compile": true,
          "sections": {"training": {"optimizer": "adamw8bit"}}}'
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic.alias_generators import to_camel

from benchmarks.kernel_table import PEAK_BYTES, PEAK_FLOPS, kernels, summarize
from benchmarks.throughput import Case, make_case_task
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.models.fused_linear_cross_entropy import LossHead
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask
from tests.trainer.support.layouts import release
from tests.trainer.support.measured import QuicklyBuiltWorker, machine, publish, torchrun_group

WARM_UP = 4


class ProfiledWorker(QuicklyBuiltWorker):
    """A worker that profiles the step after the warm-up into a file, and stops."""

    def __init__(self, task: WorkerTask, reporter: ProgressReporter, trace: Path) -> None:
        super().__init__(task, 0, 1, reporter)
        self._trace = trace
        self._profiler: Any = None
        self.seconds = 0.0

    def set_up(self) -> None:
        """Mark the optimizer step."""
        super().set_up()
        zero = self.context.engine.optimizer
        zero.step = _marked("optimizer", zero.step)

    def propose_flags(self, step: int) -> Flags:
        """Begin and end the profile between two steps; the first forward pass of a step has been launched before."""
        if step == WARM_UP:
            _synchronize()
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.__enter__()
            self._began = time.perf_counter()
        elif step == WARM_UP + 1:
            _synchronize()
            self.seconds = time.perf_counter() - self._began
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(str(self._trace))
        return Flags(stop=step > WARM_UP)


def profile(case: Case) -> dict[str, Any]:
    """Train a case for some steps; returns the table of the last one."""
    root = Path(tempfile.mkdtemp())
    try:
        task, planned = make_case_task(root, case, 1)
        logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
        trace = root / "trace.json"
        with ProgressReporter(logs, 0, hang_timeout_seconds=600) as reporter:
            worker = ProfiledWorker(task, reporter, trace)
            try:
                worker.train()
            finally:
                if hasattr(worker, "context"):
                    release(worker.context.engine)
                    worker.release()
        found = kernels(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
        steps = list(files.read_lines(logs.steps))
        measured = {"profiledSeconds": round(worker.seconds, 4), "stepSeconds": [step["seconds"] for step in steps]}
        return {**planned, **measured, **(summarize(found) if found else {"rows": []})}
    finally:
        shutil.rmtree(root)


def _marked(name: str, function: Any) -> Any:
    """A function whose kernels belong to a group of the table."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return marked


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Profile every case, and write the tables after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Case.parse, help="JSON objects, as in throughput.py")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    LossHead._forward = _marked("loss", LossHead._forward)  # type: ignore[method-assign]
    results: list[dict[str, Any]] = []
    with torchrun_group() as (_rank, world_size):
        assert world_size == 1, "one GPU: torchrun --nproc-per-node 1"
        for case in options.cases:
            asked = {to_camel(name): value for name, value in asdict(case).items()}
            results.append({**asked, **profile(case)})
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            peaks = {"peakFlops": PEAK_FLOPS, "peakBytes": PEAK_BYTES}
            publish({"machine": machine(), **peaks, "cases": results}, options.output)


if __name__ == "__main__":
    main()
