"""The memory that `spotune plan` expects, against the peaks that benchmarks/throughput.py measured on H200s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from spotune.load import replace_fields
from spotune.plan.choose import Layout, Setup
from spotune.plan.config_reader import read_architecture
from spotune.plan.execution import setup_of
from spotune.plan.memory import precision_of
from tests.trainer.measured import LLAMAS, example_job

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def measured(pattern: str, *, only_first: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """World size and case of all that was measured, or of the first in each process."""
    outputs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob(pattern))]
    return [
        (found["machine"]["worldSize"], case)
        for found in outputs
        for case in found["cases"][: 1 if only_first else None]
        # With a mask, for the sake of comparison, keys and values are repeated for every head that shares them.
        if case["sections"].get("execution", {}).get("attention") != "sdpa"
    ]


# In the others of these a case at ZeRO 3 came first, of which DeepSpeed keeps something as long as the process lives.
CASES = measured("throughput_*.json") + measured("examples_*.json", only_first=True)


def setup_of_case(case: dict[str, Any]) -> Setup:
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


@pytest.mark.parametrize(
    ("world_size", "case"), CASES, ids=lambda value: str(value if isinstance(value, int) else value["size"])
)
def test_peak_is_within_a_tenth_of_the_plan(world_size: int, case: dict[str, Any]) -> None:
    layout = Layout(
        case["zeroStage"],
        case["microBatch"],
        bool(case["gradientCheckpointing"]),
        gathered_layers=case.get("gatheredLayers", 0),
        whole_gradients=case.get("wholeGradients", False),
    )
    planned = setup_of_case(case).memory(world_size, layout)
    of_tensors = planned.total_bytes - planned.runtime_bytes  # PyTorch counts those alone
    assert of_tensors == pytest.approx(case["peakAllocatedBytes"], rel=0.1)
