"""The agents on a real Ray: what starts ranks outlives them, and ranks outlive nobody."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants

from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.supervisor.ray_head import local as local_ray
from spotune_trainer.supervisor.ray_head.processes import Family, Process
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.agent_pool import Agents
from spotune_trainer.worker_group.result import Failed, GroupEnd, Room, Trained
from tests.trainer.support.live import process_name
from tests.trainer.support.runs import STEPS, Layout, Runs, make_task, start_generation
from tests.trainer.support.waiting import wait_until

pytestmark = pytest.mark.ray

SLOTS = 3
LAYOUT = Layout(2, 2)
_PATIENCE_SECONDS = 90.0


@dataclass
class Cluster:
    """One node, its agents, and groups on it."""

    runs: Runs
    family: Family
    going: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agents = Agents(draining=lambda: self.going)

    def ranks(self) -> dict[str, Process]:
        """Processes of ranks by name."""
        return self._named("spotune-rank-")

    def agent(self) -> Process:
        """The process of the agent."""
        (found,) = self._named("ray::NodeAgent").values()
        return found

    def _named(self, start: str) -> dict[str, Process]:
        named = {process_name(process): process for process in self.family.members()}
        return {name: process for name, process in named.items() if name.startswith(start)}

    def muster(self) -> None:
        until(lambda: self.agents.muster(gpus=False).ready == SLOTS)

    def task(self, epochs: int = 2) -> WorkerTask:
        directory = self.runs.empty("agents")
        job = self.runs.job(training={"epochs": epochs}, workers={"count": 2, "gpus": 0})
        return make_task(directory, job, LAYOUT, start_generation(directory))

    def start(self) -> Group:
        """A group that trains for long, after its first steps."""
        self.muster()
        group = Group(self.agents, self.task(epochs=10_000))
        until(lambda: len(list(files.read_lines(group.task.logs.steps))) > 3)
        return group


class Group:
    """A group that runs in the background."""

    def __init__(self, agents: Agents, task: WorkerTask) -> None:
        self.task = task
        self._ends: list[GroupEnd] = []
        self._thread = threading.Thread(target=lambda: self._ends.append(agents.run_group(task, 2)))
        self._thread.start()

    def end(self) -> GroupEnd:
        """How it ended."""
        self._thread.join(_PATIENCE_SECONDS)
        (end,) = self._ends
        return end


def until(condition: Callable[[], object]) -> None:
    assert wait_until(lambda: bool(condition()), _PATIENCE_SECONDS), "it did not happen"


@pytest.fixture(scope="module")
def cluster(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of its own, which this process is connected to: without a token, which it would have to know by now."""
    with pytest.MonkeyPatch.context() as patch:
        environment = local_ray._environment
        patch.setattr(local_ray, "_environment", lambda *given: environment(*given) | {"RAY_AUTH_MODE": "disabled"})
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # as in that environment
        head = local_ray.LocalRay(tmp_path_factory.mktemp("ray"), SLOTS, gpus=False)
        head.start()
        assert head.running is not None
        try:
            ray.init(address=head.running.address, log_to_driver=False)
            yield Cluster(runs, head.running.family)
        finally:
            ray.shutdown()
            head.end()


def kill(process: Process, number: int = signal.SIGKILL) -> None:
    os.kill(process.pid, number)


def test_a_group_trains_and_the_next_one_is_forked_by_the_same_agent(cluster: Cluster) -> None:
    cluster.muster()
    agent = cluster.agent()
    for _ in range(2):
        task = cluster.task()
        end = cluster.agents.run_group(task, 2)
        assert isinstance(end, Trained), end
        assert end.figures["steps"] == STEPS
        assert not cluster.ranks()
        assert cluster.agent() == agent


def test_a_killed_rank_is_lost_and_takes_the_others_with_it(cluster: Cluster) -> None:
    group = cluster.start()
    agent = cluster.agent()
    assert set(cluster.ranks()) == {"spotune-rank-0", "spotune-rank-1"}
    kill(cluster.ranks()["spotune-rank-1"])
    assert group.end() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert not cluster.ranks()
    assert cluster.agent() == agent


def test_a_rank_that_stands_still_is_ended_once_another_one_has_failed(cluster: Cluster) -> None:
    group = cluster.start()
    kill(cluster.ranks()["spotune-rank-0"], signal.SIGSTOP)
    kill(cluster.ranks()["spotune-rank-1"])
    assert group.end() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert not cluster.ranks()


def test_ranks_go_with_their_agent_and_another_one_takes_its_place(cluster: Cluster) -> None:
    group = cluster.start()
    agent = cluster.agent()
    kill(agent)
    end = group.end()
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.WORKER_LOST
    assert end.message.startswith("lost rank 0 (ActorDiedError), rank 1 (")
    until(lambda: not cluster.ranks())
    cluster.muster()
    assert cluster.agent() != agent


def test_ranks_go_with_their_fork_server_and_there_is_another_one(cluster: Cluster) -> None:
    group = cluster.start()
    parent = int(Path(f"/proc/{cluster.ranks()['spotune-rank-0'].pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)
    end = group.end()
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.WORKER_LOST
    until(lambda: not cluster.ranks())
    assert isinstance(cluster.agents.run_group(cluster.task(), 2), Trained)


def test_more_workers_than_there_is_room_for_are_not_begun(cluster: Cluster) -> None:
    cluster.muster()
    end = cluster.agents.run_group(cluster.task(), SLOTS + 1)
    assert isinstance(end, Failed)
    assert end.message.endswith(f"there is no room for {SLOTS + 1} workers any more")


def test_a_node_that_goes_keeps_its_agent_for_its_group_alone(cluster: Cluster) -> None:
    group = cluster.start()
    (node,) = cluster.agents.occupied()
    cluster.going = {node: 0.0}
    assert cluster.agents.muster(gpus=False) == Room(0, 0)
    assert len(cluster.ranks()) == 2
    kill(cluster.ranks()["spotune-rank-1"])
    group.end()
    assert cluster.agents.occupied() == set()
    assert cluster.agents.muster(gpus=False) == Room(0, 0)
    until(lambda: not cluster._named("ray::NodeAgent"))
    cluster.going = {}
    cluster.muster()
