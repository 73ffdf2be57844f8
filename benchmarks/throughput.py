r"""Measures training steps on GPUs: tokens per second, MFU, memory, data wait, and host waits for the device.

Trains models with random weights on random tokens with the trainer's own worker, one case after the other in the same
processes. The models are Llamas of several sizes, or the jobs of examples/ in the layout that the plan chooses for
these GPUs. The first steps warm up; results are medians over the others. The formula of MFU is in
`spotune_trainer.models.flops`. The result includes the peak memory that `spotune plan` predicts. Does not use Ray:
torchrun starts the ranks.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/throughput.py --output benchmarks/results/throughput_1.json \
        '{"size": "1.1B", "length": 2048, "microBatch": 16, "batch": 64, "zeroStage": 1, "compile": true}'
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.alias_generators import to_camel, to_snake
from torch import distributed

from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune.plan.config_reader import read_architecture
from spotune.plan.execution import ExecutionPlan, resolve_execution, training_setup
from spotune.plan.training_setup import Layout as PlannedLayout
from spotune.plan.training_setup import TrainingSetup
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.job_directory.run_plan import MOST_MEMORY_SAVING
from spotune_trainer.models.pretrained import load_config
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask
from tests.trainer.support.layouts import release
from tests.trainer.support.measured import (
    LLAMAS,
    QuicklyBuiltWorker,
    from_first_rank,
    machine,
    make_example_job,
    make_llama_job,
    publish,
    torchrun_group,
)
from tests.trainer.support.runs import Layout, make_task, start_generation

PROFILED_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One case: the model, the data and the layout.

    Attributes:
        size: one of `LLAMAS`, or the name of a job in examples/. Fields that are not set here come from that job, or
            from the plan for these GPUs.
        length: tokens per row.
        micro_batch: rows per forward pass on one GPU.
        batch: rows per step on all GPUs.
        zero_stage: 0 to 3.
        compile: whether layers and loss are compiled.
        precision: of the matrix products in the layers, as in `execution.precision`.
        gradient_checkpointing: whether activations are recomputed.
        documents: documents packed into each row.
        nothing_spare: at stage 3, gather layers at each use and reduce gradients in each pass, even if there is enough
            memory to keep them.
        warm_up: steps before the measured ones.
        steps: measured steps.
        sections: further sections of the job, such as `{"training": {"optimizer": "adamw8bit"}}`.
    """

    size: str
    length: int | None = None
    micro_batch: int | None = None
    batch: int | None = None
    zero_stage: int | None = None
    compile: bool | None = None
    precision: str | None = None
    gradient_checkpointing: bool | None = None
    documents: int = 1
    nothing_spare: bool = False
    warm_up: int = 4
    steps: int = 12
    sections: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Case:
        """A case from a JSON object with camelCase names."""
        return cls(**{to_snake(name): value for name, value in json.loads(text).items()})

    def job(self, folder: Path) -> FinetuneJob:
        """The job of this case, with the files it needs in a folder."""
        asked = {
            "microBatchSize": self.micro_batch,
            "zeroStage": self.zero_stage,
            "compile": self.compile,
            "precision": self.precision,
            "gradientCheckpointing": self.gradient_checkpointing,
        }
        execution = {name: value for name, value in asked.items() if value is not None}
        sections = {**self.sections, "execution": {**execution, **self.sections.get("execution", {})}}
        if self.size not in LLAMAS:
            return make_example_job(folder, self.size, self.batch, sections)
        if self.batch is None or self.length is None:
            raise ValueError(f"{self.size}: set batch and length")
        return make_llama_job(folder, self.size, self.batch, self.length, sections, self.documents, every=1_000_000)


class MeasuredWorker(QuicklyBuiltWorker):
    """A worker for a fixed number of steps. Detects host waits in one step, and profiles the last ones on request."""

    def __init__(
        self, task: WorkerTask, rank: int, world_size: int, reporter: ProgressReporter, case: Case, trace: Path | None
    ):
        super().__init__(task, rank, world_size, reporter)
        self.case = case
        self.last_step = case.warm_up + case.steps
        self.waits: Counter[str] = Counter()
        self.data_wait = 0.0
        self._trace = trace
        self._profiler: Any = None
        self._caught: Any = None

    def propose_flags(self, step: int) -> Flags:
        """Reset the counters after the warm-up; stop after the last measured or profiled step."""
        if step == self.case.warm_up:
            self._settled = self.reporter.stopwatch.seconds().get(Part.DATA_WAIT, 0.0)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        if step == self.last_step:
            self.data_wait = self.reporter.stopwatch.seconds().get(Part.DATA_WAIT, 0.0) - self._settled
        self._probe(step - self.last_step)
        return Flags(stop=step >= self.last_step + 2 + (PROFILED_STEPS if self._trace else 0))

    def _probe(self, beyond: int) -> None:
        """After the measured steps: detect host waits in one step, and profile the next ones."""
        if not torch.cuda.is_available():
            return
        if beyond == 1:
            torch.cuda.synchronize = self._counted(torch.cuda.synchronize)
            self._caught = warnings.catch_warnings(record=True)
            self._warned = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if beyond == 2:
            torch.cuda.synchronize = torch.cuda.synchronize.__wrapped__  # type: ignore[attr-defined]
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.waits.update(
                f"{Path(w.filename).name}:{w.lineno}" for w in self._warned if "synchroniz" in str(w.message)
            )
        if self._trace is not None and self.rank == 0:
            if beyond == 2:
                self._profiler = torch.profiler.profile()
                self._profiler.__enter__()
            if beyond == 2 + PROFILED_STEPS:
                torch.cuda.synchronize()
                self._profiler.__exit__(None, None, None)
                table = self._profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
                self._trace.write_text(table, encoding="utf-8")

    def _counted(self, synchronize: Callable[..., None]) -> Callable[..., None]:
        """`torch.cuda.synchronize`, of which PyTorch does not warn; counted by the line that calls the accelerator."""

        @functools.wraps(synchronize)
        def counted(*arguments: Any) -> None:
            caller = traceback.extract_stack(limit=3)[0]
            self.waits[f"{Path(caller.filename).name}:{caller.lineno}"] += 1
            synchronize(*arguments)

        return counted


def measure(
    case: Case, rank: int, world_size: int, trace: Path | None, worker_type: type[MeasuredWorker] = MeasuredWorker
) -> dict[str, Any]:
    """Train a case and return its measurements."""
    root = Path(tempfile.mkdtemp()) if rank == 0 else None
    task, planned = from_first_rank(make_case_task(root, case, world_size) if root else None)
    directory = JobDirectory(Path(task.directory))
    logs = directory.generation_logs(task.generation)
    started, held = time.monotonic(), torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    with ProgressReporter(logs, rank, hang_timeout_seconds=600) as reporter:
        worker = worker_type(task, rank, world_size, reporter, case, trace)
        try:
            worker.train()
            found = _collect_metrics(worker, case, held)
        finally:
            if hasattr(worker, "context"):
                release(worker.context.engine)
                worker.release()
    if root:
        found = {**planned, **found, **_speeds(logs.steps, worker.job, case)}
        found["wallSeconds"] = round(time.monotonic() - started, 1)
        shutil.rmtree(root)
    return found if root else {}


def make_case_task(root: Path, case: Case, world_size: int) -> tuple[WorkerTask, dict[str, Any]]:
    """The task of the ranks, and the settings that the plan chose."""
    directory = JobDirectory(root / "job")
    directory.root.mkdir()
    job = case.job(root)
    config = load_config(job).to_dict()
    plan = resolve_execution(config, job, world_size, _device_bytes())
    if case.nothing_spare:
        plan = _without_spare_memory(plan, training_setup(read_architecture(config), job), world_size)
    assert plan.memory is not None, "models of these kinds can be planned"
    planned = {
        "length": job.spec.dataset.max_length,
        "batch": job.spec.training.global_batch_size,
        "microBatch": plan.micro_batch_size,
        "zeroStage": plan.zero_stage,
        "compile": plan.compile,
        "gradientCheckpointing": plan.gradient_checkpointing,
        "gatheredLayers": plan.gathered_layers,
        "wholeGradients": plan.whole_gradients,
        "keptLayers": plan.kept_layers,
        "offloadActivations": plan.offload_activations,
        "plannedBytes": plan.memory.total_bytes,
    }
    stage, micro_batch = Layout(world_size, plan.zero_stage), plan.micro_batch_size
    task = make_task(directory, job, stage, start_generation(directory), micro_batch)
    decided = (
        "compile",
        "gradientCheckpointing",
        "gatheredLayers",
        "wholeGradients",
        "keptLayers",
        "offloadActivations",
    )
    return replace(task, plan=task.plan | {name: planned[name] for name in decided}), planned


def _without_spare_memory(plan: ExecutionPlan, setup: TrainingSetup, world_size: int) -> ExecutionPlan:
    layout = PlannedLayout(plan.zero_stage, plan.micro_batch_size, plan.gradient_checkpointing)
    return replace(plan, **MOST_MEMORY_SAVING, memory=setup.memory(world_size, layout))


def _device_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 8_000_000_000


def _collect_metrics(worker: MeasuredWorker, case: Case, held: int) -> dict[str, Any]:
    """Peak memory over all ranks, data wait, and host waits for the device in one step.

    Memory that was already `held` is not counted: DeepSpeed keeps some of a previous ZeRO-3 engine.
    """
    peaks = torch.zeros(2, dtype=torch.float64)
    if torch.cuda.is_available():
        most = (torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - held)
        peaks = torch.tensor(most, dtype=torch.float64)
    distributed.all_reduce(peaks, distributed.ReduceOp.MAX, group=worker.context.control)
    return {
        "peakAllocatedBytes": int(peaks[0]),
        "peakReservedBytes": int(peaks[1]),
        "dataWaitSeconds": round(worker.data_wait / case.steps, 5),
        "waitsForDevice": dict(worker.waits),
        "startup": worker.reporter._state["startup"],
    }


def _speeds(steps: Path, job: FinetuneJob, case: Case) -> dict[str, Any]:
    records = list(files.read_lines(steps))[case.warm_up : case.warm_up + case.steps]
    seconds = statistics.median(record["seconds"] for record in records)
    mfus = [record["mfu"] for record in records if record["mfu"] is not None]
    batch = job.spec.training.global_batch_size
    return {
        "stepSeconds": round(seconds, 5),
        "stepSecondsSpread": [
            round(min(r["seconds"] for r in records), 5),
            round(max(r["seconds"] for r in records), 5),
        ],
        "tokensPerSecond": round(batch * job.spec.dataset.max_length / seconds),
        "samplesPerSecond": round(batch / seconds, 2),
        "mfu": round(statistics.median(mfus), 4) if mfus else None,
        "losses": [records[0]["loss"], records[-1]["loss"]],
    }


def main() -> None:
    """Train every case; rank 0 prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Case.parse, help=f"JSON objects; sizes are {', '.join(LLAMAS)}")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file, after every case")
    parser.add_argument("--trace", type=Path, help="folder for a kernel profile of each case")
    options = parser.parse_args()
    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
    with torchrun_group() as (rank, world_size):
        results = []
        for number, case in enumerate(options.cases):
            trace = options.trace / f"kernels_{world_size}_{number}.txt" if options.trace else None
            asked = {to_camel(name): value for name, value in asdict(case).items()}
            try:
                found = measure(case, rank, world_size, trace)
            except torch.OutOfMemoryError:
                found = {"outOfMemory": True}
                traceback.print_exc()
            except Exception:
                if world_size > 1:
                    raise
                found = {"error": traceback.format_exc().splitlines()[-1]}
                traceback.print_exc()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            results.append({**asked, **found})
            if rank == 0:
                publish({"machine": machine(), "cases": results}, options.output)


if __name__ == "__main__":
    main()
