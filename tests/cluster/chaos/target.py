"""What faults hit: a job with its pods, nodes and volume, the operator, a service; and what an injection reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotune_testcluster.cluster import Cluster
from tests.cluster.chaos.errors import NothingToHitError
from tests.cluster.chaos.job_volume import JobVolume
from tests.cluster.chaos.schedule import PlannedFault
from tests.cluster.chaos.serving.service import ServiceUnderChaos
from tests.cluster.containers import kill_container
from tests.cluster.finetune_jobs import RunningJob
from tests.cluster.operator_install import Operator


def _nothing() -> None:
    """Nothing has to be undone."""


@dataclass(frozen=True)
class Injection:
    """An injected fault.

    Attributes:
        what: what was hit, for the record.
        undo: ends the fault; called once it has lasted for its time.
        operator_is_blind: whether the operator cannot see or write anything until the fault is undone.
        operator_restarts: whether the operator's process ends, so that a new one has to start.
    """

    what: str
    undo: Callable[[], None] = _nothing
    operator_is_blind: bool = False
    operator_restarts: bool = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to undo."""
        return self.undo is _nothing


Inject = Callable[["Target", PlannedFault], Injection]


@dataclass(frozen=True)
class Target:
    """Everything that faults of one training job hit, and what all jobs share.

    Attributes:
        machine: the cluster.
        operator: the operator of the cluster.
        job: the job.
        volume: the job's folder on the volume.
        service: the service beside the jobs.
    """

    machine: Cluster
    operator: Operator
    job: RunningJob
    volume: JobVolume
    service: ServiceUnderChaos

    def worker(self, fault: PlannedFault) -> dict[str, Any]:
        """The worker pod that a fault hits: one that has a node.

        Raises:
            NothingToHitError: there is none.
        """
        return choose("a worker pod on a node", self.workers(), fault.target)

    def workers(self) -> list[dict[str, Any]]:
        """All worker pods on nodes, by name."""
        found = [pod for pod in self.job.pods("workers") if pod["spec"].get("nodeName")]
        return sorted(found, key=name_of)

    def head(self) -> dict[str, Any]:
        """The head pod.

        Raises:
            NothingToHitError: there is none.
        """
        return choose("a head pod on a node", [pod for pod in self.job.pods("head") if pod["spec"].get("nodeName")])

    def node_of(self, pod: dict[str, Any]) -> str:
        """The node of a pod, if it is running.

        Raises:
            NothingToHitError: it is down.
        """
        node: str = pod["spec"]["nodeName"]
        if not self.machine.nodes().get(node):
            raise NothingToHitError(f"node {node} is down")
        return node

    def delete_pods(self, *pods: dict[str, Any], force: bool = False) -> str:
        """Delete pods without waiting; returns their names."""
        names = [name_of(pod) for pod in pods]
        if not names:
            raise NothingToHitError("there is no pod")
        options = ("--force", "--grace-period=0") if force else ()
        self.job.kubectl("delete", "pods", *names, "--wait=false", "--ignore-not-found", *options)
        return " ".join(names)

    def kill(self, pod: dict[str, Any], container: str) -> Injection:
        """`kill -9` of a container.

        Raises:
            NothingToHitError: it does not run.
        """
        running = [found for found in pod["status"].get("containerStatuses", []) if "running" in found["state"]]
        if container not in {found["name"] for found in running}:
            raise NothingToHitError(f"container {container} of {name_of(pod)} does not run")
        kill_container(self.machine, pod, container)
        return Injection(name_of(pod))

    def execute(self, pod: dict[str, Any], container: str, *command: str) -> str:
        """Run a command in a container; returns its output."""
        return self.job.kubectl("exec", name_of(pod), f"--container={container}", "--", *command, timeout=30)


def choose(what: str, candidates: list[dict[str, Any]], fraction: float = 0.0) -> dict[str, Any]:
    """One of several objects.

    Raises:
        NothingToHitError: there are none.
    """
    if not candidates:
        raise NothingToHitError(f"there is no {what.removeprefix('a ')}")
    return candidates[int(fraction * len(candidates))]


def name_of(pod: dict[str, Any]) -> str:
    """The name of a pod."""
    return str(pod["metadata"]["name"])
