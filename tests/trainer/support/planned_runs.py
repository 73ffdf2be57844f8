"""Runs that benchmarks/throughput.py has measured, each with the memory that the current plan predicts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from spotune.job.execution import FP8_PRECISIONS
from spotune.job_file.load import replace_fields
from spotune.plan.config_reader import read_architecture
from spotune.plan.execution import training_setup
from spotune.plan.memory import precision_of
from spotune.plan.speed.gpus import gpu_speed
from spotune.plan.speed.step_time import RATES, Rates, StepTime, estimate_step_time
from spotune.plan.training_setup import Layout, TrainingSetup
from tests import ROOT
from tests.trainer.support.measured import LLAMAS, example_job

RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class MeasuredRun:
    """One case of one output of benchmarks/throughput.py.

    Attributes:
        world_size: GPUs.
        case: the configuration and its measurements, as in the output.
        output: name of the output, without its ending.
        number: of the case in the output, from 0.
        device: name of the GPU.
    """

    world_size: int
    case: dict[str, Any]
    output: str = ""
    number: int = 0
    device: str = "NVIDIA H200"

    @property
    def measured_bytes(self) -> int:
        """Peak memory that PyTorch allocated on a GPU."""
        peak: int = self.case["peakAllocatedBytes"]
        return peak

    @property
    def planned_bytes(self) -> int:
        """Memory of PyTorch's tensors on a GPU, as the plan predicts it."""
        planned = self.setup.memory(self.world_size, self.layout)
        return planned.total_bytes - planned.runtime_bytes  # PyTorch counts tensors alone

    def planned_step(self, rates: Rates = RATES) -> StepTime | None:
        """The time of a step as the plan predicts it for the GPU; None if it does not."""
        dtype = "bfloat16" if self.setup.precision.is_mixed else "float32"
        gpu = gpu_speed("h200" if "H200" in self.device else "h100-80gb", dtype)
        assert gpu is not None, "all outputs are of H200s and H100s"
        return estimate_step_time(self.setup, self.layout, self.world_size, gpu, rates)

    @cached_property
    def setup(self) -> TrainingSetup:
        """The case as an input of the plan."""
        return _setup(self.case)

    @property
    def layout(self) -> Layout:
        """How the case was distributed."""
        case = self.case
        return Layout(
            case["zeroStage"],
            case["microBatch"],
            bool(case["gradientCheckpointing"]),
            gathered_layers=case.get("gatheredLayers", 0),
            whole_gradients=case.get("wholeGradients", False),
            kept_layers=case.get("keptLayers", 0),
            offload_activations=case.get("offloadActivations", False),
        )


def read_runs(file: Path) -> list[MeasuredRun]:
    """All cases of an output file: a list, or by name."""
    found = json.loads(file.read_text())
    cases = found["cases"].values() if isinstance(found["cases"], dict) else found["cases"]
    machine = found["machine"]
    return [
        MeasuredRun(machine["worldSize"], case, file.stem, number, machine["device"])
        for number, case in enumerate(cases)
    ]


def runs_with_memory() -> list[MeasuredRun]:
    """Runs whose measured memory can be compared with the plan."""
    # Only the first example of each process: DeepSpeed keeps memory of a ZeRO-3 run until the process exits.
    outputs = [read_runs(file) for file in sorted(RESULTS.glob("throughput_*.json"))]
    outputs += [read_runs(file)[:1] for file in sorted(RESULTS.glob("examples_*.json"))]
    return [
        run
        for runs in outputs
        for run in runs
        # Masked SDPA, which is measured for comparison, repeats shared keys and values for every head.
        if run.case["sections"].get("execution", {}).get("attention") != "sdpa" and not _recomputed_attention(run.case)
    ]


STEPS_NOT_PREDICTED = {
    ("throughput_1_documents", 2): "documents are kept apart by a mask, which is measured for comparison",
    ("throughput_1_examples", 4): "the processor updates the parameters",
    ("throughput_1_examples", 6): "the processor updates the parameters",
    ("throughput_2_examples", 5): "the processor updates the parameters",
    (
        "throughput_2_large_examples",
        0,
    ): "layers that are not compiled at ZeRO-3 on several GPUs: the processor launches the communication",
    ("large_models", 4): "the processor updates the parameters, as before states on the host were copied",
}
"""Runs whose step time the plan does not predict within 15 %, by output and number, and why."""


def runs_with_step_time() -> list[MeasuredRun]:
    """Runs of benchmarks/throughput.py, long_rows.py and large_models.py on one or two GPUs; ADR 90 names others."""
    outputs = [*sorted(RESULTS.glob("throughput_*.json")), *sorted(RESULTS.glob("same_gpu*.json"))]
    outputs += [RESULTS / "long_rows.json", RESULTS / "large_models.json"]
    return [run for file in outputs for run in read_runs(file)]


def _recomputed_attention(case: dict[str, Any]) -> bool:
    """Whether a run is older than compiled layers that keep the output of attention when they are recomputed."""
    return case["compile"] and bool(case["gradientCheckpointing"]) and "keptLayers" not in case


def _setup(case: dict[str, Any]) -> TrainingSetup:
    """The case as an input of the plan."""
    if case["size"] not in LLAMAS:
        job, config = example_job(case["size"])
        changes: dict[str, Any] = {"spec.model.initialise": "random", "spec.training.globalBatchSize": case["batch"]}
        for part, values in case["sections"].items():
            changes |= {f"spec.{part}.{name}": value for name, value in values.items()}
        if case["zeroStage"] is not None:
            changes["spec.execution.zeroStage"] = case["zeroStage"]
        return training_setup(read_architecture(config), replace_fields(job, changes))
    adapter = case["sections"].get("adapter")
    return TrainingSetup(
        architecture=read_architecture(LlamaConfig(**LLAMAS[case["size"]]).to_dict()),
        precision=precision_of("bfloat16", case["sections"].get("training", {}).get("optimizer", "adamw")),
        global_batch_size=case["batch"],
        sequence_length=case["length"],
        documents_per_row=case.get("documents", 1),
        pretrained=False,
        lora_rank=adapter and adapter["lora"]["r"],
        lora_dropout=adapter is not None and adapter["lora"].get("dropout", 0) > 0,
        quantised=adapter is not None and adapter.get("quantization", "none") != "none",
        offload=case["sections"].get("execution", {}).get("offload", "none"),
        compiled=case["compile"],
        fp8=case["precision"] if case.get("precision") in FP8_PRECISIONS else None,
        chunked_loss=case["compile"],
    )
