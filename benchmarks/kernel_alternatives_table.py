"""The table of other ways to compute the largest kernels in docs/benchmarks.md, from kernel_alternatives.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.trainer.support.planned_runs import RESULTS

OUTPUT = RESULTS / "kernel_alternatives.json"


@dataclass(frozen=True)
class KernelAlternativesTable:
    """A line for each alternative to what a step does now, which is the first of a task."""

    file: Path = OUTPUT

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        layers = json.loads(self.file.read_text(encoding="utf-8"))["layers"]
        yield f"| kernels | now | {' | '.join(f'{size}, now' for size in layers)} | instead | {' | '.join(layers)} |"
        yield "|---" * (3 + 2 * len(layers)) + "|"
        tasks = {size: layer["milliseconds"] for size, layer in layers.items()}
        for task, alternatives in next(iter(tasks.values())).items():
            now, *others = alternatives
            times = " | ".join(f"{of[task][now]:.2f} ms" for of in tasks.values())
            for other in others:
                changes = " | ".join(f"{100 * (of[task][other] / of[task][now] - 1):+.1f} %" for of in tasks.values())
                yield f"| {task} | {now} | {times} | {other} | {changes} |"


TABLES: dict[str, KernelAlternativesTable] = {"kernel-alternatives": KernelAlternativesTable()}
