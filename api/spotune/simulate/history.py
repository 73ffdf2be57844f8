"""The nodes that a job has had so far, as a trace of its market: from the ledger in its directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spotune.errors import UsageError
from spotune.simulate.measured import LEDGER, interpreting, read_records
from spotune.simulate.trace import Trace

_LOSSES: Final = ("workerLost", "preempted")
"""Causes of failures by which a group loses nodes."""
_SHORTEST: Final = 60.0
"""Seconds of a history from which something can be told."""


def read_history(directory: Path) -> Trace:
    """The available spot nodes over time, as a job has seen them, starting with its first worker group.

    While a group runs, there are as many nodes as it has. After the loss of a worker there is one less, until the
    driver says how many there are: it waits with so many, or starts the next group.

    Args:
        directory: The job's directory.

    Raises:
        UsageError: There is no ledger or no time in it, or not all of the job's nodes were spot nodes.
    """
    job, records = _read(directory / "job.json"), read_records(directory, "--history")
    with interpreting(directory / "job.json"):
        workers: Mapping[str, Any] = json.loads(job).get("spec", {}).get("workers", {})
        pools = workers.get("pools") or []
        kinds = {pool.get("capacity", "spot") for pool in pools} or {workers.get("capacity", "spot")}
        per_node = max(1, int(workers.get("gpus", 1)))
    if kinds != {"spot"}:
        raise UsageError(f"--history {directory}: the job may have had on-demand nodes, which say nothing about spot.")
    with interpreting(directory / LEDGER):
        points = [(time, slots // per_node) for time, slots in _slots(records)]
    if len(points) < 2 or points[-1][0] - points[0][0] < _SHORTEST:
        raise UsageError(f"--history {directory}: no worker group of this job has run for a while yet.")
    begin = points[0][0]
    changes = {time - begin: nodes for time, nodes in points[:-1]}  # of several at one time, the last
    return Trace(tuple(sorted(changes.items())), points[-1][0] - begin)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--history {file.parent}: cannot read {file.name}: {error.strerror}.") from error


def _slots(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, int]]:
    """Pairs of (Unix time, worker processes that there are nodes for), from the first worker group on."""
    size, has_begun = 0, False
    for record in records:
        time, event = float(record["time"]), record["event"]
        if event in ("generation-started", "adopted"):
            size, has_begun = int(record.get("worldSize", size)), True
        elif event == "waiting":
            size = int(record["slots"])
        elif event == "failure" and record.get("cause") in _LOSSES:
            size = max(0, size - 1)
        if has_begun:
            yield time, size
