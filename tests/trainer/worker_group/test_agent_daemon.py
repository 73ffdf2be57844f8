"""When an agent without a driver ends its ranks, and itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankPlacement, WorkerTask
from spotune_trainer.worker_group.agent_daemon import IDLE_SECONDS, ORPHAN_SECONDS, AgentDaemon
from spotune_trainer.worker_group.node_state import NodeGroup

PLACE = RankPlacement(0, 0, 1, 1, "127.0.0.1", 29500)


@dataclass
class ScriptedAgent:
    """An agent of which the test says whether its ranks run; it records what was asked of them."""

    task: WorkerTask
    is_running: bool = True
    is_left: bool = False
    asked: list[str] = field(default_factory=list)

    def group(self) -> NodeGroup:
        return NodeGroup(self.task, (PLACE,))

    def kill_ranks(self) -> None:
        self.asked.append("end")

    def leave(self, seconds: float | None, reason: str) -> None:
        assert seconds is None
        self.asked.append("leave")


@dataclass
class Scene:
    """A daemon whose clock the test sets; it has had no driver since 0."""

    directory: JobDirectory
    agent: ScriptedAgent
    now: float = 0.0

    def __post_init__(self) -> None:
        self.daemon = AgentDaemon(self.agent, Path("unused"), gpus=False, clock=lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A daemon whose ranks are of generation 1."""
    directory = JobDirectory(tmp_path)
    generation = claim(directory, None).number
    return Scene(directory, ScriptedAgent(WorkerTask(str(tmp_path), generation, None, {}, {})))


def test_ranks_without_a_driver_train_on_for_a_while_then_they_are_asked_to_leave(scene: Scene) -> None:
    scene.now = ORPHAN_SECONDS
    assert not scene.daemon.check()
    assert scene.agent.asked == []
    scene.now += 1
    assert not scene.daemon.check()
    assert scene.agent.asked == ["leave"]


def test_superseded_ranks_without_a_driver_are_killed(scene: Scene) -> None:
    claim(scene.directory, None)
    assert not scene.daemon.check()
    assert scene.agent.asked == ["end"]


def test_agent_without_ranks_waits_for_the_next_driver_then_it_ends(scene: Scene) -> None:
    scene.agent.is_running = False
    scene.now = IDLE_SECONDS
    assert not scene.daemon.check()
    scene.now += 1
    assert scene.daemon.check()


def test_agent_whose_ranks_have_ended_without_a_driver_keeps_their_results_for_the_next_one(scene: Scene) -> None:
    scene.now = ORPHAN_SECONDS - 1
    assert not scene.daemon.check()
    scene.agent.is_running = False
    scene.now += IDLE_SECONDS
    assert not scene.daemon.check()
    scene.now += 1
    assert scene.daemon.check()
