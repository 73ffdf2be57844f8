"""The memory that `spotune plan` expects, against the peaks that benchmarks/throughput.py measured on H200s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from spotune.plan.activations import Workload
from spotune.plan.config_reader import read_architecture
from spotune.plan.memory import MIXED, estimate_memory
from spotune.plan.parameters import trained_parameters
from tests.trainer.measured import LLAMAS

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CASES = [
    (found["machine"]["worldSize"], case)
    for found in (json.loads(file.read_text()) for file in sorted(RESULTS.glob("throughput_*.json")))
    for case in found["cases"]
]


@pytest.mark.parametrize(
    ("world_size", "case"), CASES, ids=lambda value: str(value if isinstance(value, int) else value["size"])
)
def test_peak_is_within_a_tenth_of_the_plan(world_size: int, case: dict[str, Any]) -> None:
    architecture = read_architecture(LlamaConfig(**LLAMAS[case["size"]]).to_dict())
    adapter = case["sections"].get("adapter")
    planned = estimate_memory(
        architecture,
        Workload(
            case["microBatch"],
            case["length"],
            gradient_checkpointing=case["gradientCheckpointing"],
            compiled=case["compile"],
        ),
        MIXED,
        case["zeroStage"],
        world_size,
        trained=trained_parameters(architecture, pretrained=False, lora_rank=adapter and adapter["lora"]["r"]),
        runtime_bytes=0,  # PyTorch counts tensors alone
    )
    assert planned.total_bytes == pytest.approx(case["peakAllocatedBytes"], rel=0.1)
