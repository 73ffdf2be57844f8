"""The tables on FP8 of docs/benchmarks.md, from the results of benchmarks/throughput.py and fp8_loss.py.

A result that does not exist has no rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

from tests.trainer.support.planned_runs import RESULTS, MeasuredRun

OUTPUTS: Mapping[str, str] = {
    "throughput_1_fp8": "1.1B, rows of 2,048",
    "throughput_1_8B_fp8": "8B, rows of 4,096, 8-bit AdamW",
}
"""Label of the model by result file. The cases of a file take turns; of each precision the mean is shown."""
LOSS = "fp8_loss"
BESIDE_TORCHTITAN: Mapping[str, tuple[str, str]] = {
    "1.1B, rows of 2,048": ("throughput_1_beside_torchtitan", "torchtitan_fp8_1"),
    "8B, rows of 4,096": ("throughput_1_8B_beside_torchtitan", "torchtitan_fp8_1_8B"),
}
"""Results in the same call by label of the model: ours, and torchtitan's."""
PRECISIONS = ("bf16", "fp8", "fp8-rowwise")


class Lines(Protocol):
    """A table."""

    def lines(self) -> Iterator[str]:
        """The lines of the table in Markdown."""


@dataclass(frozen=True)
class SpeedTable:
    """Whole steps of each precision, optimizer included, beside bfloat16 in the same call."""

    def lines(self) -> Iterator[str]:
        """The lines of the table in Markdown."""
        yield "| model | precision | tokens/s | against bf16 | MFU | memory | planned | output |"
        yield "|---|---|---|---|---|---|---|---|"
        for output, label in OUTPUTS.items():
            of = {name: [case for case in _cases(output) if case["precision"] == name] for name in PRECISIONS}
            for precision, cases in of.items():
                if cases:
                    yield f"| {label} | {precision} | {_figures(cases, of['bf16'])} | [{output}]({_path(output)}) |"


def _figures(cases: Sequence[Mapping[str, Any]], exact: Sequence[Mapping[str, Any]]) -> str:
    speed, memory = mean(case["tokensPerSecond"] for case in cases), mean(case["peakAllocatedBytes"] for case in cases)
    factor = speed / mean(case["tokensPerSecond"] for case in exact)
    planned = MeasuredRun(1, dict(cases[0])).planned_bytes
    mfu = mean(case["mfu"] for case in cases)
    return f"{speed:,.0f} | {factor:.2f} | {100 * mfu:.1f} % | {memory / 1e9:.1f} GB | {planned / 1e9:.1f} GB"


@dataclass(frozen=True)
class LossTable:
    """Final losses of each precision: the difference from bfloat16 beside what seeds differ by."""

    def lines(self) -> Iterator[str]:
        """The lines of the table in Markdown."""
        yield "| precision | held-out loss, mean | standard deviation over seeds | difference from bf16, by seed |"
        yield "|---|---|---|---|"
        file = RESULTS / f"{LOSS}.json"
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))["comparison"]["heldOutLoss"]
            for precision, figures in found.items():
                by_seed = ", ".join(f"{each:+.4f}" for each in figures.get("differencesBySeed", []))
                yield (
                    f"| {precision} | {figures['mean']:.4f} | {figures['standardDeviationOverSeeds']:.4f} | {by_seed} |"
                )


@dataclass(frozen=True)
class TorchtitanTable:
    """Whole steps of each precision beside those of torchtitan in the same call."""

    def lines(self) -> Iterator[str]:
        """The lines of the table in Markdown."""
        yield "| model | precision | tokens/s | torchtitan | times as many | MFU | torchtitan | memory | torchtitan |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for label, (ours, theirs) in BESIDE_TORCHTITAN.items():
            rivals = {rival["precision"]: rival for rival in _cases(theirs)}
            for case in _cases(ours):
                precision = case["precision"] or "bf16"
                yield f"| {label} | {precision} | {_beside(case, rivals[precision])} |"


def _beside(case: Mapping[str, Any], rival: Mapping[str, Any]) -> str:
    both, speeds = (case, rival), [each["tokensPerSecond"] for each in (case, rival)]
    cells = [
        *(f"{speed:,}" for speed in speeds),
        f"{speeds[0] / speeds[1]:.2f}",
        *(f"{100 * each['mfu']:.1f} %" for each in both),
        *(f"{each['peakAllocatedBytes'] / 1e9:.1f} GB" for each in both),
    ]
    return " | ".join(cells)


def _cases(output: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{output}.json"
    cases: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else []
    return cases


def _path(output: str) -> str:
    return f"../benchmarks/results/{output}.json"


FP8_TABLES: Mapping[str, Lines] = {"fp8": SpeedTable(), "fp8-loss": LossTable(), "torchtitan": TorchtitanTable()}
"""The tables, by the name in the page's comments."""
