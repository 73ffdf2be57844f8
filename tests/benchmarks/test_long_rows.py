"""Tables of long rows, from made results, and what benchmarks/long_rows.py counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.long_rows import CASES, DocumentMeter
from benchmarks.long_rows_tables import CaseTable, KernelTable
from spotune_trainer.data.batches import collate
from spotune_trainer.models.flops import ModelShape


def made_case(length: int, **values: Any) -> dict[str, Any]:
    return {
        "size": "8B",
        "length": length,
        "batch": 2,
        "documents": 1,
        "sections": {},
        "gradientCheckpointing": False,
        "keptLayers": 0,
        "offloadActivations": False,
        "stepSeconds": 10.0,
        "tokensPerSecond": 1000,
        "mfu": 0.5,
        "peakAllocatedBytes": 90_000_000_000,
        "plannedBytes": 92_500_000_000,
        **values,
    }


@pytest.fixture
def output(tmp_path: Path) -> Path:
    shape = {"size": "8B", "length": 32768, "heads": 32, "groups": 8, "headSize": 128}
    long = {"gradientCheckpointing": True, "keptLayers": 12, "offloadActivations": True, "mfu": 0.4}
    content = {
        "kernels": [
            {**shape, "kernel": "flash", "seconds": 0.05, "partOfPeak": 0.3},
            {**shape, "kernel": "cudnn", "error": "no such kernel"},
        ],
        "cases": {"short": made_case(4096), "long": made_case(32768, **long), "huge": {"outOfMemory": True}},
    }
    file = tmp_path / "made.json"
    file.write_text(json.dumps(content))
    return file


def test_a_line_compares_long_rows_with_short_ones(output: Path) -> None:
    _, _, short, long, huge = CaseTable(output).lines()
    assert short == "| short | none | 1,000 | 50.0 % |  |  | 90.0 GB | 91.0 GB |"
    # 32 layers x 2 rows x 0.05 s of 10 s.
    assert long == "| long | 20 of 32, offloaded | 1,000 | 40.0 % | 80.0 % | 32.0 % | 90.0 GB | 91.0 GB |"
    assert huge.startswith("| huge | out of memory |")


def test_kernels_that_failed_have_no_figure(output: Path) -> None:
    assert list(KernelTable(output).lines())[2:] == ["| 32 and 8, 128 | 32,768 | 30.0 % |  |"]


def test_there_is_no_table_before_anything_is_measured(tmp_path: Path) -> None:
    assert list(CaseTable(tmp_path / "none").lines()) == list(KernelTable(tmp_path / "none").lines()) == []


def test_mfu_counts_the_documents_of_packed_rows() -> None:
    shape = ModelShape(1000, 2, 16)
    tokens = np.arange(2, 14)
    packed = {"input_ids": tokens, "lengths": np.array([5, 7], dtype=np.int32)}
    meter = DocumentMeter(shape, None)
    assert meter.flops(collate([packed], "causal", pad_token_id=0)) == shape.causal_flops([5, 7])
    assert meter.flops(collate([{"input_ids": tokens}], "causal", pad_token_id=0)) == shape.causal_flops([12])


def test_the_goals_of_long_rows_are_among_the_cases() -> None:
    lengths = {(each.case.size, each.case.length, "adapter" in each.case.sections) for each in CASES.values()}
    assert {("8B", 131072, True), ("8B", 32768, False), ("1.1B", 131072, False)} <= lengths
