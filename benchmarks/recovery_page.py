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
_PROCESSES = _RESULTS / "recovery_processes.json"
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

_ANNOUNCED = """## Nodes that are announced to go ([ADR 58](adr/0058-leaving-is-a-decision.md))

No step is lost if the workers leave before the node does. The time that is lost is that of the last
commit, of the parts `start` to `firstStep` of the next group, and of the wait for a replacement or
of the steps that a smaller group makes more slowly. The driver
[weighs](how-to/workers.md#what-the-driver-weighs) them by what the run has measured, and the event
`leaving` of the ledger has all values.
"""

_PROCESSES_TEXT = """## Processes that may stay ([ADR 57](adr/0057-processes-stay.md))

[recovery_processes.py](../benchmarks/recovery_processes.py) kills one of four CPU workers after the
other. In one way the other ranks keep their processes, in the other way all ranks are forked anew.
Runs of both ways take turns, with eight kills each. A recovery ends with the first step of the next
worker group.

Medians in seconds, {cores} cores that other work shares, `benchmarks/results/{file}`.
`leave` lasts until the driver knows that the group has ended, `decide` until it has claimed the
next generation, `process` until rank 0 begins.
"""
_PROCESSES_MEANING = """
A new process pays for what each library does at its first use: it shows in `data`, `model` and
`engine`. The larger model has 34 million parameters. Four processes on two cores need longer for
its first step than for their start, so the difference between the two ways is within the noise. On
GPUs this is not measured yet. Processes are kept with `SPOTUNE_KEEP_RANK_PROCESSES=1`, which is not
the default.

In both ways, ranks look for rank 0 every 10 ms. PyTorch alone waits for half a second and more
after its first attempt, which cost every rank that was ready before rank 0.
"""


def page() -> str:
    """Return the page as Markdown."""
    tables = [line for title, path in _MEASURED.items() for line in _table(title, path)]
    return "\n".join([_TEXT, *tables, *_loading(), _ANNOUNCED, *_processes()])


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


def _processes() -> Iterator[str]:
    """Recovery in kept and in new processes."""
    measured = json.loads(_PROCESSES.read_text())
    yield _PROCESSES_TEXT.format(cores=measured["machine"]["cores"], file=_PROCESSES.name)
    parts = list(next(iter(measured["models"]["tiny"].values()))["medianSeconds"])
    yield f"| model | way | {' | '.join(parts)} |"
    yield "|---" * (len(parts) + 2) + "|"
    for model, ways in measured["models"].items():
        for way, found in ways.items():
            seconds = " | ".join(f"{found['medianSeconds'][part]:.2f}" for part in parts)
            yield f"| {model} | {way} | {seconds} |"
    yield _PROCESSES_MEANING


if __name__ == "__main__":
    sys.stdout.write(page())
