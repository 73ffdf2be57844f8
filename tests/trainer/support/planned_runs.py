"""Runs that benchmarks/throughput.py has measured, each with the memory that the plan expects of it now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from spotune.job_file.load import replace_fields
from spotune.plan.config_reader import read_architecture
from spotune.plan.execution import setup_of
from spotune.plan.layout import Layout, Setup
from spotune.plan.memory import precision_of
from tests.trainer.support.measured import LLAMAS, example_job

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@dataclass(frozen=True)
class MeasuredRun:
    """One case of one output of benchmarks/throughput.py.

    Attributes:
        world_size: GPUs.
        case: what was run, and what came of it.
    """

    world_size: int
    case: dict[str, Any]

    @property
    def measured_bytes(self) -> int:
        """Peak of what PyTorch allocated on a GPU."""
        peak: int = self.case["peakAllocatedBytes"]
        return peak

    @property
    def planned_bytes(self) -> int:
        """What the plan expects of PyTorch's tensors on a GPU."""
        case = self.case
        layout = Layout(
            case["zeroStage"],
            case["microBatch"],
            bool(case["gradientCheckpointing"]),
            gathered_layers=case.get("gatheredLayers", 0),
            whole_gradients=case.get("wholeGradients", False),
        )
        planned = _setup(case).memory(self.world_size, layout)
        return planned.total_bytes - planned.runtime_bytes  # PyTorch counts tensors alone


def read_runs(file: Path) -> list[MeasuredRun]:
    """All cases of an output."""
    found = json.loads(file.read_text())
    return [MeasuredRun(found["machine"]["worldSize"], case) for case in found["cases"]]


def runs_with_memory() -> list[MeasuredRun]:
    """Those whose memory was measured by itself, and is that of a plan."""
    # Of the examples the first of each process: DeepSpeed keeps something of a run at ZeRO 3 as long as that lives.
    outputs = [read_runs(file) for file in sorted(RESULTS.glob("throughput_*.json"))]
    outputs += [read_runs(file)[:1] for file in sorted(RESULTS.glob("examples_*.json"))]
    return [
        run
        for runs in outputs
        for run in runs
        # With a mask, for the sake of comparison, keys and values are repeated for every head that shares them.
        if run.case["sections"].get("execution", {}).get("attention") != "sdpa"
    ]


def _setup(case: dict[str, Any]) -> Setup:
    """What is trained, as the plan sees it."""
    if case["size"] not in LLAMAS:
        job, config = example_job(case["size"])
        changes: dict[str, Any] = {"spec.model.initialise": "random"}
        for part, values in case["sections"].items():
            changes |= {f"spec.{part}.{name}": value for name, value in values.items()}
        if case["zeroStage"] is not None:
            changes["spec.execution.zeroStage"] = case["zeroStage"]
        return setup_of(read_architecture(config), replace_fields(job, changes))
    adapter = case["sections"].get("adapter")
    return Setup(
        architecture=read_architecture(LlamaConfig(**LLAMAS[case["size"]]).to_dict()),
        precision=precision_of("bfloat16", case["sections"].get("training", {}).get("optimizer", "adamw")),
        global_batch_size=case["batch"],
        sequence_length=case["length"],
        pretrained=False,
        lora_rank=adapter and adapter["lora"]["r"],
        lora_dropout=adapter is not None and adapter["lora"].get("dropout", 0) > 0,
        compiled=case["compile"],
        chunked_loss=case["compile"],
    )
