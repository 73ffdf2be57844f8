"""When a group leaves the node of its slowest rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from spotune.job import WorkersSpec
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.fitness.straggler_replacement import StragglerReplacement


@dataclass
class Group:
    """Ranks 0 to 2 on a node each, of which some have been slow for ten minutes."""

    directory: JobDirectory
    nodes: int = 3
    now: float = 10_000.0
    left_out: list[tuple[int, str]] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.directory)

    def leave_out(self, rank: int, reason: str, at_least: int) -> bool:
        if self.nodes - 1 < at_least:
            return False
        self.left_out.append((rank, reason))
        return True

    def replacement(self, *ratios: float, planned_minimum: int = 1) -> StragglerReplacement:
        logs = self.directory.generation_logs(1)
        slow = [
            {"rank": rank, "node": f"n{rank}", "ratio": ratio, "since": self.now - 600}
            for rank, ratio in enumerate(ratios)
            if ratio > 1
        ]
        logs.root.mkdir(parents=True, exist_ok=True)
        files.write_json(logs.progress, {"stragglers": slow or None})
        clocks = (lambda: self.now), (lambda: self.now)
        return StragglerReplacement(logs, planned_minimum, self.ledger, self.leave_out, *clocks)


def workers(**fields: Any) -> WorkersSpec:
    given = {"count": 3, "min": 1, "gpus": 0, "resizeCooldown": "60s", "onStraggler": "replace"}
    return WorkersSpec.model_validate(given | fields)


def test_slowest_rank_is_left_out_at_most_once_per_cooldown(directory: JobDirectory) -> None:
    group = Group(directory)
    reason = "rank 2 on n2 took 1.60 of the median for 10 minutes"
    assert group.replacement(1.0, 1.3, 1.6).reason(1, workers()) == reason
    assert group.left_out == [(2, f"straggler: {reason}")]
    (event,) = group.ledger.records("straggler-replaced")
    assert (event["generation"], event["rank"], event["node"], event["ratio"]) == (1, 2, "n2", 1.6)
    group.now = event["time"] + 59
    assert group.replacement(1.0, 1.3).reason(2, workers()) is None, "it is too soon, also for another group"
    group.now = event["time"] + 61
    assert group.replacement(1.0, 1.3).reason(2, workers()) is not None


@pytest.mark.parametrize(
    ("fields", "planned_minimum", "ratios"),
    [
        pytest.param({"onStraggler": "report"}, 1, (1.0, 1.5, 1.0), id="only reported"),
        pytest.param({}, 1, (1.0, 1.0, 1.0), id="nobody is slow"),
        pytest.param({"count": 4, "min": 3}, 1, (1.0, 1.5, 1.0), id="too few would remain"),
        pytest.param({"min": "auto"}, 3, (1.0, 1.5, 1.0), id="too few for the memory of the model"),
    ],
)
def test_group_stays(
    directory: JobDirectory, fields: dict[str, Any], planned_minimum: int, ratios: tuple[float, ...]
) -> None:
    group = Group(directory)
    assert group.replacement(*ratios, planned_minimum=planned_minimum).reason(1, workers(**fields)) is None
    assert not group.left_out
    assert not group.ledger.records("straggler-replaced")
