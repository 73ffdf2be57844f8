"""The table of large models in docs/benchmarks.md, from the results of large_models.py and hf_trainer.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_rows_tables import RUNTIME_BYTES, percent
from tests.trainer.support.planned_runs import RESULTS

OUTPUT = RESULTS / "large_models.json"
RIVAL = RESULTS / "hf_trainer_32B_lora.json"
_GB = 10**9


@dataclass(frozen=True)
class LargeModelTable:
    """One line for each case, and one for Hugging Face's Trainer; no line before they are measured."""

    file: Path = OUTPUT
    rival: Path = RIVAL

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        if not self.file.exists():
            return
        yield "| model | micro-batch | layers computed again | tokens/s | MFU | memory | planned |"
        yield "|---|---|---|---|---|---|---|"
        for name, case in json.loads(self.file.read_text())["cases"].items():
            yield _line(name, case)
        if self.rival.exists():
            yield from _rival_lines(json.loads(self.rival.read_text()))


TABLES: dict[str, LargeModelTable] = {"large-models": LargeModelTable()}


def _line(name: str, case: Mapping[str, Any]) -> str:
    again = f"all but {case['keptLayers']}" if case["gradientCheckpointing"] else "none"
    planned = f"{(case['plannedBytes'] - RUNTIME_BYTES) / _GB:.1f} GB"
    speed, memory = f"{case['tokensPerSecond']:,}", f"{case['peakAllocatedBytes'] / _GB:.1f} GB"
    if case["size"].startswith("t5"):
        speed = f"{case['samplesPerSecond']} samples/s"
    return f"| {name} | {case['microBatch']} | {again} | {speed} | {percent(case['mfu'])} | {memory} | {planned} |"


def _rival_lines(content: Mapping[str, Any]) -> Iterator[str]:
    for run in content["runs"]:
        kernels = " with Liger kernels" if run["liger"] else ""
        name = f"{content['size']}, LoRA, Hugging Face's Trainer{kernels}"
        memory = f"{run['peakAllocatedBytes'] / _GB:.1f} GB"
        again = "all" if content["gradient_checkpointing"] else "none"
        speed = f"{run['tokensPerSecond']:,}"
        yield f"| {name} | {content['micro_batch']} | {again} | {speed} | {percent(run['mfu'])} | {memory} |  |"
