"""The tables of long rows in docs/benchmarks.md, from the result of benchmarks/long_rows.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.support.measured import LLAMAS
from tests.trainer.support.planned_runs import RESULTS

Content = Mapping[str, Any]

OUTPUT = RESULTS / "long_rows.json"
_COLUMNS = (
    "case",
    "layers computed again",
    "tokens/s",
    "MFU",
    "of that at 4k",
    "attention of the step",
    "memory",
    "planned",
)
_SHORT = 4096
"""Length of the rows that others are compared with."""
_GB = 10**9
RUNTIME_BYTES = int(1.5 * _GB)
"""Of the planned memory, what PyTorch does not allocate."""


@dataclass(frozen=True)
class CaseTable:
    """Trained models, one line for each case; no line before they are measured."""

    file: Path = OUTPUT

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        if not self.file.exists():
            return
        content = json.loads(self.file.read_text())
        yield f"| {' | '.join(_COLUMNS)} |"
        yield "|---" * len(_COLUMNS) + "|"
        for name, case in content["cases"].items():
            if "stepSeconds" in case:
                yield _case_line(content, name, case)
            else:
                yield f"| {name} | {'out of memory' if case.get('outOfMemory') else case['error']} | | | | | | |"


@dataclass(frozen=True)
class KernelTable:
    """Attention alone, one line for each shape; no line before it is measured."""

    file: Path = OUTPUT

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        if not self.file.exists():
            return
        kernels = json.loads(self.file.read_text())["kernels"]
        names = list(dict.fromkeys(each["kernel"] for each in kernels))
        yield f"| heads of queries and keys, size | tokens | {' | '.join(names)} |"
        yield f"|---|---|{'---|' * len(names)}"
        for shape in dict.fromkeys((k["heads"], k["groups"], k["headSize"], k["length"]) for k in kernels):
            heads, groups, size, length = shape
            found = {k["kernel"]: k for k in kernels if (k["heads"], k["groups"], k["headSize"], k["length"]) == shape}
            cells = (percent(found[name].get("partOfPeak")) if name in found else "" for name in names)
            yield f"| {heads} and {groups}, {size} | {length:,} | {' | '.join(cells)} |"


TABLES: dict[str, CaseTable | KernelTable] = {"long-rows": CaseTable(), "attention": KernelTable()}


def _case_line(content: Content, name: str, case: Content) -> str:
    layers = LLAMAS[case["size"]]["num_hidden_layers"]
    again = f"{layers - case['keptLayers']} of {layers}" if case["gradientCheckpointing"] else "none"
    again += ", offloaded" if case["offloadActivations"] else ""
    memory, planned = case["peakAllocatedBytes"], case["plannedBytes"] - RUNTIME_BYTES
    cells = [
        name,
        again,
        f"{case['tokensPerSecond']:,}",
        percent(case["mfu"]),
        percent(_against_short(content, case)),
        percent(_attention_part(content, case, layers)),
        f"{memory / _GB:.1f} GB",
        f"{planned / _GB:.1f} GB",
    ]
    return f"| {' | '.join(cells)} |"


def _against_short(content: Content, case: Content) -> float | None:
    """MFU over that of the same model in rows of 4,096 tokens."""
    kinds = (
        short["mfu"]
        for short in content["cases"].values()
        if short["length"] == _SHORT and short["size"] == case["size"] and _is_adapter(short) == _is_adapter(case)
    )
    short = next(kinds, None)
    return case["mfu"] / short if short and case["mfu"] and case["length"] != _SHORT else None


def _is_adapter(case: Content) -> bool:
    return "adapter" in case["sections"]


def _attention_part(content: Content, case: Content, layers: int) -> float | None:
    """Part of a step that the fastest kernel needs for its rows of one document, forward and backward."""
    if case["documents"] > 1:
        return None
    seconds = [
        kernel["seconds"]
        for kernel in content["kernels"]
        if kernel["size"] == case["size"] and kernel["length"] == case["length"] and "seconds" in kernel
    ]
    return min(seconds) * layers * case["batch"] / case["stepSeconds"] if seconds else None


def percent(part: float | None) -> str:
    """A part of a whole, for display; nothing if it is unknown."""
    return "" if part is None else f"{100 * part:.1f} %"
