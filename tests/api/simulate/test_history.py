"""The nodes that a job had, from its ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import UsageError
from spotune.simulate.history import read_history

BEGIN = 1_800_000_000.0
EVENTS: list[tuple[float, dict[str, Any]]] = [
    (-30, {"event": "waiting", "slots": 2, "wanted": 4}),
    (0, {"event": "generation-started", "worldSize": 4}),
    (900, {"event": "committed", "step": 3}),
    (1000, {"event": "failure", "cause": "preempted"}),
    (1000, {"event": "generation-ended", "worldSize": 4}),
    (1060, {"event": "generation-started", "worldSize": 4}),
    (2000, {"event": "failure", "cause": "workerLost"}),
    (2010, {"event": "waiting", "slots": 0, "wanted": 4}),
    (3000, {"event": "generation-started", "worldSize": 2}),
    (3500, {"event": "failure", "cause": "appError"}),
    (4000, {"event": "generation-started", "worldSize": 4}),
    (5000, {"event": "finished"}),
]


def directory(folder: Path, events: list[tuple[float, dict[str, Any]]], **workers: Any) -> Path:
    (folder / "job.json").write_text(json.dumps({"spec": {"workers": workers}}))
    lines = [json.dumps({"time": BEGIN + time, **event}) for time, event in events]
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_trace_has_losses_and_waits(tmp_path: Path) -> None:
    trace = read_history(directory(tmp_path, EVENTS, gpus=1))
    nodes = [(0.0, 4), (900.0, 4), (1000.0, 3), (1060.0, 4), (2000.0, 3), (2010.0, 0), (3000.0, 2), (3500.0, 2)]
    assert trace.changes == (*nodes, (4000.0, 4))
    assert trace.seconds == 5000
    two = read_history(directory(tmp_path, EVENTS, gpus=2, pools=[{"name": "a"}]))
    assert [count for _, count in two.changes] == [2, 2, 1, 2, 1, 0, 1, 1, 2], "nodes with two GPUs each"


@pytest.mark.parametrize(
    ("events", "workers", "message"),
    [
        (EVENTS, {"capacity": "spot-then-on-demand"}, "may have had on-demand nodes"),
        (EVENTS, {"pools": [{"name": "a"}, {"name": "b", "capacity": "on-demand"}]}, "may have had on-demand nodes"),
        (EVENTS[:2], {}, "no worker group of this job has run for a while yet"),
    ],
)
def test_what_says_nothing_about_spot_nodes_is_refused(
    tmp_path: Path, events: list[tuple[float, dict[str, Any]]], workers: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_history(directory(tmp_path, events, **workers))


def test_a_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read job\.json: No such file"):
        read_history(tmp_path)
