"""A real Ray of one or more nodes on this machine, its agent pool, and worker groups on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ray

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.node_name import NODE_NAME
from spotune_trainer.supervisor.ray_head import local as local_ray
from spotune_trainer.supervisor.ray_head.processes import Process, ProcessFamily
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.agent_daemon import PROCESS_NAME
from spotune_trainer.worker_group.agent_pool import AgentPool
from spotune_trainer.worker_group.result import GroupResult
from tests.trainer.support.connected_ray import connected_ray
from tests.trainer.support.live import held_segments, process_name
from tests.trainer.support.runs import Layout, Runs, make_task, start_generation
from tests.trainer.support.waiting import wait_until

LAYOUT = Layout(2, 2)
_PATIENCE_SECONDS = 90.0
_NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

parameters = RayParams(
    gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=int(sys.argv[2]), num_gpus=0,
    object_store_memory=80 * 1024 * 1024, node_manager_port=0, dashboard_agent_listen_port=None,
    include_log_monitor=False,
)
node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=False)
sys.stdin.read()
"""
"""Starts a further node. `ray start` would not: it takes 127.0.0.1 for the address of another laptop."""


@dataclass
class Cluster:
    """A Ray, its agent pool, and worker groups on it."""

    runs: Runs
    family: ProcessFamily
    slots: int
    directory: Path
    draining: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agents = self.new_pool()

    def new_pool(self) -> AgentPool:
        """The pool of another driver."""
        return AgentPool(self.directory, draining=lambda: self.draining)

    def ranks(self) -> dict[str, Process]:
        """Processes of the ranks, by name."""
        return self.named("spotune-rank-")

    def agent(self) -> Process:
        """The process of the only agent."""
        (found,) = self.named(PROCESS_NAME).values()
        return found

    def agent_memory_bytes(self) -> int:
        """Memory of the segments that the agent holds."""
        return sum(segment.stat().st_blocks * 512 for segment in held_segments(self.agent()))

    def named(self, start: str) -> dict[str, Process]:
        """Processes whose names start with this, by name."""
        named = {process_name(process): process for process in self.family.members()}
        return {name: process for name, process in named.items() if name.startswith(start)}

    def ensure(self) -> None:
        """Wait until all agents are ready."""
        until(lambda: self.agents.ensure(gpus=False).ready == self.slots)

    def task(self, epochs: int = 2) -> WorkerTask:
        """The task of the first generation of a new job."""
        directory = self.runs.empty("agents")
        job = self.runs.job(training={"epochs": epochs}, workers={"count": 2, "gpus": 0})
        return next_task(directory, job)

    def start(self) -> Group:
        """Start a group that trains for a long time, and wait for its first steps."""
        self.ensure()
        group = Group(self.agents, self.task(epochs=10_000))
        until(lambda: len(list(files.read_lines(group.task.logs.steps))) > 3)
        return group


class Group:
    """A worker group that runs in the background."""

    def __init__(self, agents: AgentPool, task: WorkerTask, world_size: int = LAYOUT.world_size) -> None:
        self.task = task
        self._results: list[GroupResult] = []
        self._thread = threading.Thread(target=lambda: self._results.append(agents.run_group(task, world_size)))
        self._thread.start()

    def result(self) -> GroupResult:
        """Wait for the group to exit; returns its result."""
        self._thread.join(_PATIENCE_SECONDS)
        (result,) = self._results
        return result


def next_task(directory: JobDirectory, job: FinetuneJob) -> WorkerTask:
    """Claim the next generation of a job; returns its task."""
    return make_task(directory, job, LAYOUT, start_generation(directory))


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; an error if it does not become true in time."""
    assert wait_until(lambda: bool(condition()), _PATIENCE_SECONDS), "the condition did not become true in time"


def kill(process: Process, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process."""
    os.kill(process.pid, number)


@contextmanager
def started_cluster(runs: Runs, folder: Path, *slots: int) -> Iterator[Cluster]:
    """A local Ray, to which this process connects.

    Args:
        runs: data and jobs.
        folder: for its files.
        slots: number of ranks that each of its nodes can run; the second node is called n2, the next one n3.
    """
    with ExitStack() as stack:
        head = stack.enter_context(connected_ray(folder, slots[0]))
        for number, further in enumerate(slots[1:], start=2):
            stack.enter_context(_started_node(head, further, f"n{number}"))
            if number < len(slots):  # of two that start at once, one waits in vain
                until(partial(_has_nodes, number))
        yield Cluster(runs, head.family, sum(slots), runs.empty("agents").root)


def _has_nodes(number: int) -> bool:
    return len([node for node in ray.nodes() if node["Alive"]]) == number


@contextmanager
def _started_node(head: local_ray.RunningRay, slots: int, node_name: str) -> Iterator[None]:
    name, value = head.family.marker.split("=", 1)
    environment = {name: value, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    environment[NODE_NAME] = node_name
    command = [sys.executable, "-c", _NODE, head.address, str(slots)]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.PIPE, start_new_session=True
    ) as node:
        yield
        node.kill()  # its children end with the head
