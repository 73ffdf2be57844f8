r"""Checks objectives, optimizers and mixtures on GPUs: the losses of TRL and sentence-transformers, exact resumes.

In fp32 and with `execution.deterministic`, at each ZeRO stage. The expected losses are those of the reference libraries
on a CPU, which `make test` compares with ours as well. Each run is interrupted and resumed; samples, losses and weights
must be those of the uninterrupted run. Jobs with `execution.reproducible: worldSize` also have `sha256`: of all states
after the last step, which must be the same at any number of GPUs. Does not use Ray: torchrun starts the ranks.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_objectives.py \
        --output benchmarks/results/gpu_objectives_2.json

Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

from benchmarks.gpu_exactness import STAGES, resume
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.mixtures import mixture_job
from tests.trainer.support.embedding import embedding_job
from tests.trainer.support.labelled import labelled_job
from tests.trainer.support.measured import from_first_rank, machine, publish, torchrun_group
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import MICRO_BATCH, STEPS, Layout, Runs, committed_state

_RESULTS = Path(__file__).parent / "results"
_TRL = "trl_preference.json"
_SENTENCE_TRANSFORMERS = "sentence_transformers_embedding.json"
_TOLERANCE = 1e-4
"""Relative difference of a loss from the reference library's."""

Make = Callable[..., FinetuneJob]
"""Makes a job from `Runs`, a folder for its model and rows, and sections of the spec."""


@dataclass(frozen=True)
class Case:
    """What is trained at several ZeRO stages.

    Attributes:
        make: makes the job.
        reference: file of the expected losses, and its entry; None without.
        stages: ZeRO stages that support it.
        reproducible: whether to train with the same bits at any world size.
    """

    make: Make
    reference: tuple[str, str] | None = None
    stages: Sequence[int] = STAGES
    reproducible: bool = False

    def expected(self) -> list[float] | None:
        """The losses of the reference library."""
        if self.reference is None:
            return None
        file, entry = self.reference
        found: list[float] = json.loads((_RESULTS / file).read_text(encoding="utf-8"))["losses"][entry]
        return found


@dataclass(frozen=True)
class CaseRun:
    """A case with the folder of its model and rows; see `gpu_exactness.HasJob`."""

    case: Case
    root: Path

    def job(self, runs: Runs, **checkpoint: int) -> FinetuneJob:
        """The job, with a commit every five steps."""
        self.root.mkdir(exist_ok=True)
        execution: dict[str, Any] = {"deterministic": True}
        if self.case.reproducible:
            execution |= {"reproducible": "worldSize", "microBatchSize": MICRO_BATCH}
        return self.case.make(runs, self.root, execution=execution, checkpoint={"every": 5, "keep": 9, **checkpoint})


def _preference(objective: str, **sections: Any) -> Make:
    return lambda _, root, **more: preference_job(root, objective, **sections, **more)


def _optimizer(task: str = "causal", **training: Any) -> Make:
    return lambda runs, _, **more: runs.job(task, training=training, **more)


CASES = {
    **{name: Case(_preference(name), (_TRL, name)) for name in ("dpo", "orpo", "simpo", "kto", "reward")},
    "dpo, LoRA": Case(_preference("dpo", adapter={"lora": {"r": 4, "dropout": 0.1}}), stages=(1, 2)),
    "embedding": Case(lambda _, root, **more: embedding_job(root, **more), (_SENTENCE_TRANSFORMERS, "encoder")),
    "embedding, dropout": Case(lambda _, root, **more: embedding_job(root, negatives=True, dropout=0.1, **more)),
    "classification": Case(lambda _, root, **more: labelled_job(root, dropout=0.1, **more)),
    "tokenClassification": Case(lambda _, root, **more: labelled_job(root, "tokenClassification", dropout=0.1, **more)),
    "muon": Case(_optimizer(optimizer="muon"), stages=(0, 1, 2)),
    "adafactor": Case(_optimizer(optimizer="adafactor"), stages=(0, 1, 2)),
    "schedule_free_adamw": Case(_optimizer(optimizer="schedule_free_adamw", scheduler="constant", warmupSteps=0)),
    "EMA": Case(_optimizer(emaDecay=0.9)),
    "mixture": Case(lambda runs, _, **more: mixture_job(runs, STEPS, **more)),
    "reproducible": Case(_optimizer(), stages=(0, 1, 2), reproducible=True),
    "reproducible, dpo": Case(_preference("dpo"), stages=(0, 1, 2), reproducible=True),
}


def check(runs: Runs, name: str, layout: Layout) -> dict[str, Any]:
    """Train a case without and with an interruption; returns what was found."""
    case = CASES[name]
    folder = f"{list(CASES).index(name)}-{layout.zero_stage}"
    directory = JobDirectory(runs.root / f"run-{folder}")
    steps, resumed = resume(runs, directory, layout, CaseRun(case, runs.root / f"rows-{folder}"))
    found: dict[str, Any] = {"case": name, "zeroStage": layout.zero_stage, "steps": len(steps), **resumed}
    expected = case.expected()
    if expected is not None:
        pairs = zip(steps, expected, strict=True)
        found["largestRelativeDifferenceFromReference"] = max(abs(step["loss"] / loss - 1) for step, loss in pairs)
    if case.reproducible:
        newest = choose_checkpoint(directory).checkpoint
        assert isinstance(newest, Checkpoint)
        digest = hashlib.sha256()
        for state, tensor in sorted(committed_state(directory, newest.name.step).items()):
            digest.update(state.encode() + tensor.numpy().tobytes())
        found["sha256"] = digest.hexdigest()
    return found


def is_good(found: dict[str, Any]) -> bool:
    """Whether the resumed run was exact, and the losses were those of the reference."""
    exact = all(found[name] for name in ("resumedSamplesEqual", "resumedLossesEqual", "resumedParametersBitEqual"))
    difference: float = found.get("largestRelativeDifferenceFromReference", 0.0)
    return exact and difference <= _TOLERANCE


def main() -> int:
    """Check all cases at this world size; rank 0 prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES, help="ZeRO stages to test")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with torchrun_group() as (rank, world_size):
        runs = Runs(from_first_rank(Path(tempfile.mkdtemp()) if rank == 0 else None))
        found: dict[str, Any] = {"machine": machine(), "cases": []}
        for name in options.cases:
            for stage in CASES[name].stages:
                if stage in options.stages:
                    found["cases"].append(check(runs, name, Layout(world_size, stage)))
                    if rank == 0:
                        publish(found, options.output)
        distributed.barrier()
    if rank == 0:
        shutil.rmtree(runs.root)
    return int(not all(is_good(each) for each in found["cases"]))


if __name__ == "__main__":
    sys.exit(main())
