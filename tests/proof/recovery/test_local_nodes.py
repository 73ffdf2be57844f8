"""Nodes of a schedule whose run ends while they join."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.proof.nodes import JoinError
from tests.proof.recovery.local_nodes import LocalNodes
from tests.trainer.support.live import LiveRun


@dataclass
class RunWithoutRay:
    """A run whose Ray is gone."""

    names: list[str] = field(default_factory=list)

    def ray(self) -> None:
        return None

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [{"event": name} for name in self.names if name in names]


def nodes_of(run: RunWithoutRay) -> LocalNodes:
    return LocalNodes(cast("LiveRun", run), [1, 1], gpus=False)


def test_no_node_joins_a_run_that_has_finished() -> None:
    nodes = nodes_of(RunWithoutRay(["finished"]))
    nodes.join_missing()
    nodes.begin_to_join_missing()
    nodes.wait_until_joined()
    assert nodes.slots == 1


def test_a_run_without_a_ray_that_has_not_finished_is_an_error() -> None:
    nodes = nodes_of(RunWithoutRay())
    with pytest.raises(JoinError):
        nodes.join_missing()
    nodes.begin_to_join_missing()
    with pytest.raises(RuntimeError, match="a node could not join"):
        nodes.wait_until_joined()
