"""When an agent without a driver ends its ranks, and itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankPlacement, WorkerTask
from spotune_trainer.worker_group.agent_daemon import IDLE_SECONDS, ORPHAN_SECONDS, AgentDaemon
from spotune_trainer.worker_group.agent_link import ATTACH, DESCRIBE, call
from spotune_trainer.worker_group.node_state import NodeGroup
from tests.trainer.support.waiting import wait_until

PLACE = RankPlacement(0, 0, 1, 1, "127.0.0.1", 29500)


@dataclass
class ScriptedAgent:
    """An agent of which the test says whether its ranks run; it records what was asked of them."""

    task: WorkerTask
    is_running: bool = True
    is_left: bool = False
    has_trained: bool = False
    asked: list[str] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def set_driver(self, driver: str, secret: bytes) -> None:
        self.asked.append(driver)
        assert self.answers.wait(10.0)

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


def test_driver_that_is_lost_before_it_is_answered_is_no_driver(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    daemon = AgentDaemon(scene.agent, path, gpus=False, clock=lambda: scene.now)  # type: ignore[arg-type]
    threading.Thread(target=daemon.run, daemon=True).start()
    assert wait_until(path.exists, 10.0)
    with Client(str(path), "AF_UNIX") as connection:
        connection.send((ATTACH, ("lost", b"secret"), {}))
    assert wait_until(lambda: scene.agent.asked == ["lost"], 10.0)
    scene.agent.answers.set()
    assert wait_until(lambda: call(path, DESCRIBE).driver == "", 10.0)
    path.with_suffix(".new").touch()  # the listener removes it at exit
