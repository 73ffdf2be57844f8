"""The plan's activation memory, compared with peaks measured on a GPU (`benchmarks/plan_memory.py`)."""

import json
from typing import Any

import pytest

from spotune.plan.activations import Workload, activation_bytes
from spotune.plan.config_reader import read_architecture
from spotune.plan.known_models import KNOWN_CONFIGS
from tests import ROOT

MEASURED: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "plan_memory.json").read_text())["measured"]


def name_of(case: dict[str, Any]) -> str:
    recompute = "-checkpointing" if case["gradient_checkpointing"] else ""
    return f"{case['model']}-{case['dtype']}{recompute}"


@pytest.mark.parametrize("case", MEASURED, ids=name_of)
def test_activations_are_estimated_as_measured(case: dict[str, Any]) -> None:
    workload = Workload(
        micro_batch_size=case["micro_batch_size"],
        sequence_length=case["sequence_length"],
        target_length=case["target_length"],
        bytes_per_element=4 if case["dtype"] == "float32" else 2,
        gradient_checkpointing=case["gradient_checkpointing"],
    )
    estimated = activation_bytes(read_architecture(KNOWN_CONFIGS[case["model"]]), workload).total_bytes

    # Bytes decide whether a micro-batch fits, so a small peak may be further off in per cent.
    assert estimated == pytest.approx(case["peak_bytes"], rel=0.06, abs=150_000_000)
