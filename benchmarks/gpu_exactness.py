r"""Checks on GPUs that samples, losses and weights are exactly the same for every ZeRO stage and after a resume.

For each stage and precision, trains a small T5 with dropout for ten steps, and then again from the checkpoint after
step five. Compares sample hashes and losses with stage 0, and parameters bit for bit with the uninterrupted run. One
more run has two steps with a loss that is not finite; they must not change anything. Runs in float16, with 8-bit
moments, an adapter, compiled layers, FP8, offload, and rows of 2,048 and 8,192 tokens are resumed in the same way, all
with `execution.deterministic`. Rows of 2,048 are also run without it, to measure how much those differ. Finally
converts a tiny Llama's checkpoint to DeepSpeed's universal format and back. Does not use Ray: torchrun starts the
ranks.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_exactness.py \
        --output benchmarks/results/gpu_exactness_2.json

One process group leaves most of a GPU idle. Parts may run side by side, and their outputs are then put together:

    for part in 1 2 3; do
        torchrun --standalone ... benchmarks/gpu_exactness.py --part $part/3 --output part_$part.json &
    done; wait
    PYTHONPATH=. python benchmarks/gpu_exactness.py --merge part_?.json --output benchmarks/results/gpu_exactness_2.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed
from torch._inductor.utils import fresh_cache

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.trainer.support import plain_deepspeed
from tests.trainer.support.measured import from_first_rank, machine, make_llama_job, publish, torchrun_group
from tests.trainer.support.overflowing_worker import OVERFLOWING_STEPS, OverflowingWorker
from tests.trainer.support.runs import Layout, Runs, committed, committed_state, make_task, start_generation, train_rank

STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
INTERRUPTED_AFTER = 5


@dataclass(frozen=True)
class Part:
    """One of several parts of the further configurations. The first part also has all layouts and conversions.

    Attributes:
        index: from 0.
        of: number of parts.
    """

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse `1/3`, the first of three."""
        number, of = (int(each) for each in text.split("/"))
        if not 1 <= number <= of:
            message = f"part {number} of {of} does not exist"
            raise ValueError(message)
        return cls(number - 1, of)


class HasJob(Protocol):
    """What is trained."""

    def job(self, runs: Runs, **checkpoint: int) -> FinetuneJob:
        """The job, with values of its section `checkpoint`; called anew for each generation."""


@dataclass(frozen=True)
class Kind:
    """A configuration to test.

    Attributes:
        task: the model's task.
        dtype: the model's dtype.
        sections: further sections of the job.
        length: tokens per row, in bfloat16; None for rows of very different lengths up to about eighty.
        documents: documents packed into each such row.
        deterministic: whether to use deterministic kernels only.
        same_bits_as: sections of the job with which the uninterrupted run must end with the same bits.
    """

    task: str = "seq2seq"
    dtype: str = "bfloat16"
    sections: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    documents: int = 1
    deterministic: bool = True
    same_bits_as: Mapping[str, Any] | None = None

    def job(self, runs: Runs, **checkpoint: int) -> FinetuneJob:
        """The job of this configuration: ten steps."""
        execution = {"deterministic": self.deterministic, **self.sections.get("execution", {})}
        sections = {**self.sections, "execution": execution}
        if self.length is None:
            return runs.job(self.task, self.dtype, checkpoint=checkpoint, **sections)
        folder = runs.root / f"rows-of-{self.length}-with-{self.documents}"
        shutil.rmtree(folder, ignore_errors=True)
        sections["training"] = {**sections.get("training", {}), "maxSteps": 2 * INTERRUPTED_AFTER, "seed": 7}
        every = {"every": INTERRUPTED_AFTER, **checkpoint}
        return make_llama_job(folder, "small", 12, self.length, sections, self.documents, **every)


RECOMPUTED = {"compile": True, "gradientCheckpointing": True}
OFFLOADED = RECOMPUTED | {"offloadActivations": True}
KINDS = {
    "float16": Kind("causal", "float16"),
    "adamw8bit": Kind(sections={"training": {"optimizer": "adamw8bit"}}),
    "adamw8bit, compiled": Kind(
        "causal", sections={"training": {"optimizer": "adamw8bit"}, "execution": {"compile": True}}
    ),
    "LoRA": Kind("causal", sections={"adapter": {"lora": {"r": 4}}}),
    "QLoRA": Kind("causal", sections={"adapter": {"lora": {"r": 4}, "quantization": "nf4"}}),
    "compiled": Kind("causal", sections={"execution": {"compile": True}}),
    "compiled, activations recomputed": Kind(
        "causal", sections={"execution": {"compile": True, "gradientCheckpointing": True}}
    ),
    "FP8": Kind(length=2048, sections={"execution": {"compile": True, "precision": "fp8"}}),
    "FP8 by rows": Kind(length=2048, sections={"execution": {"compile": True, "precision": "fp8-rowwise"}}),
    "FP8, activations recomputed": Kind(
        length=2048, sections={"execution": {"compile": True, "precision": "fp8", "gradientCheckpointing": True}}
    ),
    "FP8, LoRA": Kind(
        length=2048,
        sections={"execution": {"compile": True, "precision": "fp8"}, "adapter": {"lora": {"r": 16, "dropout": 0.1}}},
    ),
    "optimizer on the host": Kind(sections={"execution": {"offload": "optimizer"}}, same_bits_as={}),
    "optimizer on the host, compiled": Kind(
        length=2048,
        sections={"execution": {"offload": "optimizer", "compile": True}},
        same_bits_as={"execution": {"compile": True}},
    ),
    "optimizer on the host, 8-bit moments": Kind(
        length=2048,
        sections={"training": {"optimizer": "adamw8bit"}, "execution": {"offload": "optimizer", "compile": True}},
        same_bits_as={"training": {"optimizer": "adamw8bit"}, "execution": {"compile": True}},
    ),
    "rows of 2,048": Kind(length=2048),
    "rows of 2,048, compiled": Kind(length=2048, sections={"execution": {"compile": True}}),
    "rows of 2,048, eight documents each": Kind(length=2048, documents=8, sections={"execution": {"compile": True}}),
    "long rows, recomputed": Kind(length=8192, sections={"execution": RECOMPUTED}),
    "long rows, offloaded": Kind(length=8192, sections={"execution": OFFLOADED}),
    "long rows of eight documents, offloaded": Kind(length=8192, documents=8, sections={"execution": OFFLOADED}),
    "long rows, offloaded, not compiled": Kind(length=8192, sections={"execution": OFFLOADED | {"compile": False}}),
    "long rows, offloaded, LoRA": Kind(
        length=8192, sections={"execution": OFFLOADED, "adapter": {"lora": {"r": 16, "dropout": 0.1}}}
    ),
}
"""Further configurations. Each is resumed at the lowest stage that shards anything, and at the highest."""
_NOT_AT_STAGE_3 = ("QLoRA", "FP8, LoRA", "long rows, offloaded, LoRA")
"""Quantised weights cannot be sharded, and frozen ones cannot be gathered for compiled layers."""
_ANY_KERNELS = {
    f"{name}, any kernels": replace(kind, deterministic=False)
    for name, kind in KINDS.items()
    if kind.length == 2048 and not name.startswith("FP8")
}
KINDS = _ANY_KERNELS | KINDS  # the others set up cuBLAS for the process


def train(
    runs: Runs,
    directory: JobDirectory,
    layout: Layout,
    kind: HasJob,
    worker: type[Worker] = Worker,
    **checkpoint: int,
) -> None:
    """One generation on all ranks."""
    rank, task = distributed.get_rank(), None
    if rank == 0:
        directory.root.mkdir(exist_ok=True)
        task = make_task(directory, kind.job(runs, **checkpoint), layout, start_generation(directory))
    train_rank(rank, layout.world_size, from_first_rank(task), worker)
    distributed.barrier()


def final_parameters(directory: JobDirectory) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint."""
    checkpoint = choose_checkpoint(directory).checkpoint
    assert isinstance(checkpoint, Checkpoint)
    return read_parameters(checkpoint)


def compare(runs: Runs, layout: Layout, dtype: str, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Train without and with an interruption; returns the comparison."""
    directory = JobDirectory(runs.root / f"{dtype}-{layout.zero_stage}")
    whole, found = resume(runs, directory, layout, Kind(dtype=dtype))
    reference[:] = reference or whole
    pairs = list(zip(reference, whole, strict=True))
    return {
        "dtype": dtype,
        "zeroStage": layout.zero_stage,
        "sameSamplesAsStage0": all(a["samples"] == b["samples"] for a, b in pairs),
        "largestRelativeLossDifferenceFromStage0": _largest_difference(reference, whole),
        **found,
        **overflow(runs, layout, dtype),
    }


def resume(
    runs: Runs, directory: JobDirectory, layout: Layout, kind: HasJob
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train without and with an interruption; returns the uninterrupted steps, and whether both runs are equal."""
    train(runs, directory, layout, kind)
    whole, parameters = surviving_steps(directory), final_parameters(directory)
    distributed.barrier()
    if distributed.get_rank() == 0:
        for path in directory.checkpoints.iterdir():
            if CheckpointName.parse(path.name).step > INTERRUPTED_AFTER:
                shutil.rmtree(path)
        shutil.rmtree(directory.compiled, ignore_errors=True)
    distributed.barrier()
    torch.compiler.reset()
    with fresh_cache():  # as in a process that finds nothing compiled
        train(runs, directory, layout, kind)
    again, resumed = surviving_steps(directory), final_parameters(directory)
    return whole, {
        "resumedSamplesEqual": [r["samples"] for r in whole] == [r["samples"] for r in again],
        "resumedLossesEqual": [r["loss"] for r in whole] == [r["loss"] for r in again],
        "resumedParametersBitEqual": all(torch.equal(parameters[name], resumed[name]) for name in parameters),
        "largestRelativeLossDifference": _largest_difference(whole, again),
    }


def _largest_difference(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Largest relative difference between the losses of two runs."""
    return max(abs(float(a["loss"]) / float(b["loss"]) - 1) for a, b in zip(steps, others, strict=True))


def resume_kinds(runs: Runs, world_size: int, stages: Sequence[int], only: str, part: Part) -> Iterator[dict[str, Any]]:
    """Resume a run of every further configuration of this part whose name begins with `only`."""
    for number, (name, kind) in enumerate(KINDS.items()):
        if number % part.of != part.index or not name.startswith(only):
            continue
        if kind.dtype == "float16" and not torch.cuda.is_available():
            continue
        for stage in (1, 2 if name in _NOT_AT_STAGE_3 else 3):
            if stage not in stages:
                continue
            directory = JobDirectory(runs.root / f"kind-{number}-{stage}")
            layout = Layout(world_size, stage)
            steps, resumed = resume(runs, directory, layout, kind)
            found = {"kind": name, "zeroStage": stage, "lastLoss": steps[-1]["loss"], **resumed}
            if kind.same_bits_as is not None and stage < 3:  # at stage 3 the processor takes the step
                other = JobDirectory(runs.root / f"other-{number}-{stage}")
                train(runs, other, layout, replace(kind, sections=kind.same_bits_as))
                found["sameBitsOnTheDevice"] = _same_bits(directory, other)
            yield found


def _same_bits(directory: JobDirectory, other: JobDirectory) -> bool:
    """Whether two runs of as many steps end with the same states."""
    mine, theirs = (committed_state(each, 2 * INTERRUPTED_AFTER) for each in (directory, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def overflow(runs: Runs, layout: Layout, dtype: str) -> dict[str, Any]:
    """Train with steps whose loss is not finite; returns their effect."""
    directory = JobDirectory(runs.root / f"overflown-{dtype}-{layout.zero_stage}")
    train(runs, directory, layout, Kind(dtype=dtype), OverflowingWorker, every=1, keep=20)
    first, last = OVERFLOWING_STEPS[0], OVERFLOWING_STEPS[-1]
    before, after, later = (committed_state(directory, step) for step in (first - 1, last, last + 1))
    steps = [committed(directory, step).manifest.optimizer_step for step in (first - 1, last, last + 1)]
    return {
        "stepsSkipped": [record["step"] for record in surviving_steps(directory) if record["skipped"]],
        "skippedStepsChangeNothing": all(torch.equal(before[name], after[name]) for name in before)
        and steps == [first - 1, first - 1, first],
        "trainsOnAfterThem": any(not torch.equal(after[name], later[name]) for name in after)
        and all(bool(torch.isfinite(tensor).all()) for tensor in later.values()),
    }


def convert(root: Path, world_size: int) -> list[dict[str, Any]]:
    """Convert a checkpoint to the universal format and back; returns the differences."""
    rank = distributed.get_rank()
    found: list[dict[str, Any]] = []
    for dtype in DTYPES:
        differing = plain_deepspeed.differences_when_deepspeed_loads_ours(rank, world_size, root / f"to-{dtype}", dtype)
        found += [{"to": "DeepSpeed", "dtype": dtype, "zeroStage": s, "differing": d} for s, d in differing.items()]
    for stage in plain_deepspeed.STAGES:
        names = plain_deepspeed.differences_when_we_load_deepspeeds(rank, world_size, root / f"from-{stage}", stage)
        found.append({"from": "DeepSpeed", "dtype": "bfloat16", "zeroStage": stage, "differing": names})
    return found


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """One result made of those of all parts, which must be of one machine; kinds in the order of `KINDS`."""
    parts = [json.loads(path.read_text("utf-8")) for path in paths]
    if any(part["machine"] != parts[0]["machine"] for part in parts):
        message = "the parts were measured on different machines or with different versions"
        raise SystemExit(message)
    merged = {key: [entry for part in parts for entry in part[key]] for key in ("layouts", "kinds", "conversions")}
    names = list(KINDS)
    merged["kinds"].sort(key=lambda kind: (names.index(kind["kind"]), kind["zeroStage"]))
    return {"machine": parts[0]["machine"], **merged}


def main() -> None:
    """Compare all layouts at this world size; rank 0 prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES, help="ZeRO stages to test")
    parser.add_argument("--kinds", default="", help="only further configurations whose names begin so, and no layouts")
    parser.add_argument("--part", type=Part.parse, default=Part(0, 1), help="one of several parts, such as 1/3")
    parser.add_argument("--merge", type=Path, nargs="+", help="put these outputs of parts together; measures nothing")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.merge:
        publish(merge(options.merge), options.output)
        return
    first = options.part.index == 0 and not options.kinds
    with torchrun_group() as (rank, world_size):
        runs = Runs(from_first_rank(Path(tempfile.mkdtemp()) if rank == 0 else None))
        if rank == 0:
            runs.job()
        distributed.barrier()
        found: dict[str, Any] = {"machine": machine(), "layouts": [], "kinds": [], "conversions": []}
        for kind in resume_kinds(runs, world_size, options.stages, options.kinds, options.part):
            found["kinds"].append(kind)
            if rank == 0:
                publish(found, options.output)
        for dtype in DTYPES if first else ():
            reference: list[dict[str, Any]] = []
            for stage in options.stages:
                found["layouts"].append(compare(runs, Layout(world_size, stage), dtype, reference))
            if rank == 0:
                publish(found, options.output)
        if first:
            found["conversions"] = convert(runs.root / "universal", world_size)
    if rank == 0:
        shutil.rmtree(runs.root)
        publish(found, options.output)


if __name__ == "__main__":
    main()
