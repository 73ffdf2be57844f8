"""Writes docs/recovery.md from the results of `benchmarks/recovery.py`.

python -m benchmarks.recovery_page > docs/recovery.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results"
_MEASURED = {
    "Now: ranks are forked ([ADR 18](adr/0018-ranks-are-forked.md))": _RESULTS / "recovery.json",
    "Before: each worker group imported all modules again": _RESULTS / "recovery_before.json",
}
_LOADING = _RESULTS / "restore_from_memory.json"
_SOURCES = {
    "memory": "shared memory of the node",
    "page cache": "the volume, a local disk, in the page cache of the machine",
    "disk": "the volume, a local disk",
}
_LOSSES = {
    "firstStart": "none: first start",
    "headPodDeleted": "head pod deleted",
    "workerPodDeleted": "worker pod deleted",
    "workerPodDeletedByForce": "worker pod deleted by force",
    "workerProcessKilled": "worker process killed",
}
_TEXT = """# Where recovery time goes

How many seconds pass between a loss and the first new step, and which part of the recovery takes
them. [recovery.py](../benchmarks/recovery.py) measures it on a real Kubernetes cluster with KubeRay
([tests/cluster](../tests/cluster/README.md)). All values are medians of a few runs.

The model is tiny, one machine runs the whole cluster, and the tables are from different days.
Compare the parts within one table.

| part | seconds until |
|---|---|
| detect | the loss is first recorded |
| schedule | the replacement pod has a node |
| start | the new worker group starts: containers, Ray, supervisor and driver, a plan |
| load | the group's first step begins: processes, data, model, engine, checkpoint |
| firstStep | the first step that was not made before is done |
"""


def page() -> str:
    """Return the page as Markdown."""
    tables = [line for title, path in _MEASURED.items() for line in _table(title, path)]
    return "\n".join([_TEXT, *tables, *_loading()])


def _table(title: str, path: Path) -> Iterator[str]:
    measured: Mapping[str, Any] = json.loads(path.read_text())
    machine, losses = measured["machine"], measured["seconds"]
    parts = list(next(iter(losses.values()))["median"])
    yield f"## {title}"
    yield ""
    yield f"{machine['cores']} cores, {machine['date']}, `benchmarks/results/{path.name}`."
    yield ""
    yield f"| loss | {' | '.join(parts)} |"
    yield "|---" * (len(parts) + 1) + "|"
    for loss, found in losses.items():
        seconds = " | ".join(f"{found['median'][part]:.1f}" for part in parts)
        yield f"| {_LOSSES[loss]} | {seconds} |"
    yield ""


def _loading() -> Iterator[str]:
    """What the part `load` reads, and from where."""
    measured = json.loads(_LOADING.read_text())
    yield "## Loading from memory ([ADR 52](adr/0052-commits-stay-in-memory.md))"
    yield ""
    yield "The part `load` contains reading the checkpoint. If only processes are lost, the next worker group"
    yield "reads it from the memory of its nodes."
    yield ""
    megabytes, cores = measured["stateBytes"] / 1e6, measured["machine"]["cores"]
    yield f"{megabytes:.0f} MB, two ranks, {cores} cores that other work shares,"
    yield f"`benchmarks/results/{_LOADING.name}`."
    yield ""
    yield "| the checkpoint is read from | seconds |"
    yield "|---|---|"
    for source, seconds in measured["medianSeconds"].items():
        yield f"| {_SOURCES[source]} | {seconds:.1f} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
