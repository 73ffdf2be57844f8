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
    "Ranks are forked ([ADR 18](adr/0018-ranks-are-forked.md))": _RESULTS / "recovery.json",
    "Before: each worker group imported all modules again": _RESULTS / "recovery_before.json",
}
_LOADING = _RESULTS / "restore_from_memory.json"
_PROCESSES = _RESULTS / "recovery_processes.json"
_ON_GPUS = {
    "Before": _RESULTS / "recovery_processes_gpu_2_before.json",
    "After the first changes": _RESULTS / "recovery_processes_gpu_2_first.json",
    "Now": _RESULTS / "recovery_processes_gpu_2.json",
    "Now, one worker on one GPU": _RESULTS / "recovery_processes_gpu_1.json",
}
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

The rows of a lost head are from before [ADR 61](adr/0061-ranks-outlive-the-head.md). Today the
workers train on without a head: no step is lost, and steps pause for seconds ([the fault
suite](faults.md)).

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
its first step than for their start, so the difference between the two ways is within the noise.
Processes are kept with `SPOTUNE_KEEP_RANK_PROCESSES=1`, which is not the default.

In both ways, ranks look for rank 0 every 10 ms. PyTorch alone waits for half a second and more
after its first attempt, which cost every rank that was ready before rank 0.
"""

_GPUS_TEXT = """## On GPUs

The same measurement on {device}s: `kill -9` of one worker, two to five times. 1.1B has 13 GB of
state, at ZeRO-2 with float32 masters and moments. With two workers, collectives run over NCCL.
Medians in seconds. Each table is from another machine of the same kind.
"""
_GPUS_MEANING = """The first changes:

- **leave**: a rank that is killed leaves no time for the others to report their failure: they are
  killed at once, where they had 2 s.
- **process**: the agent freed the segments of shared memory that the next group cannot start from.
  Now the next commit overwrites them.
- **restore**: its checksum took 2 s to 3 s, since it was computed while other memory was being
  page-locked. Now it begins with the process, while data, model and engine are built.

They made **firstStep** slower by a second: memory for the next commit was page-locked during that
step. Now this follows the first step. The changes after them:

- **engine**: DeepSpeed ran compilers in each rank to find out which of its operators could be
  built, 0.6 s. The model was made in host memory and copied to the GPU, although the checkpoint
  overwrites it, 0.5 s. The CUDA context is made while the data is opened.
- **restore**: training begins before the checksum of the memory is known. Nothing is committed
  until then ([ADR 52](adr/0052-commits-stay-in-memory.md)).

What is left of **leave** is how long a killed process takes to end: the kernel releases 13 GB of
page-locked memory in half a second, and each worker has locked up to twice its state. It takes 4 s
to 7 s if the kill comes while this memory is being locked, in the first seconds of a group: once in
each of the last two tables, of four and of five recoveries.

A process that is kept aborts NCCL, leaves its generation and takes part in the next one: of eleven
recoveries nine times, and twice it ended instead and was replaced. On GPUs this saves 0.1 s of
`data`, and costs more in `leave` than ending the process. So it is not the default.
"""


def page() -> str:
    """Return the page as Markdown."""
    tables = [line for title, path in _MEASURED.items() for line in _table(title, path)]
    return "\n".join([_TEXT, *tables, *_loading(), _ANNOUNCED, *_processes(), *_on_gpus()])


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
    yield from _ways(measured["models"])
    yield _PROCESSES_MEANING


def _ways(models: Mapping[str, Any]) -> Iterator[str]:
    """A table of the median seconds of each part, by model and way."""
    parts = list(next(iter(next(iter(models.values())).values()))["medianSeconds"])
    yield f"| model | way | {' | '.join(parts)} |"
    yield "|---" * (len(parts) + 2) + "|"
    for model, ways in models.items():
        for way, found in ways.items():
            seconds = " | ".join(f"{found['medianSeconds'][part]:.2f}" for part in parts)
            yield f"| {model} | {way} | {seconds} |"


def _on_gpus() -> Iterator[str]:
    """Recovery on GPUs, as its parts were made faster."""
    measured = {time: json.loads(path.read_text()) for time, path in _ON_GPUS.items()}
    yield _GPUS_TEXT.format(device=measured["Now"]["machine"]["device"])
    for time, found in measured.items():
        yield f"**{time}**, `benchmarks/results/{_ON_GPUS[time].name}`:"
        yield ""
        yield from _ways(found["models"])
        yield ""
    yield _GPUS_MEANING


if __name__ == "__main__":
    sys.stdout.write(page())
