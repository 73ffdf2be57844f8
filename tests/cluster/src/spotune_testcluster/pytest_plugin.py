"""Fixtures for tests on a real cluster (`cluster`, `namespace`, `fault`), and the marker `cluster` of such tests.

By default one cluster is started on this machine for all tests, and removed after the last one. With
SPOTUNE_TEST_KUBECONFIG the tests run on any cluster whose context has a name for test clusters; faults that need the
machine of the cluster are skipped by name there. SPOTUNE_TEST_KEEP=1 leaves this machine's cluster up for the next run.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster import binaries, faults, requirements, volumes
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.errors import CannotRunHereError, ClusterError
from spotune_testcluster.home import Home
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.providers import Capacity, Provider
from spotune_testcluster.settings import NodeSettings

FOREIGN = "SPOTUNE_TEST_KUBECONFIG"
KEEP = "SPOTUNE_TEST_KEEP"
REQUIRED = "SPOTUNE_TEST_REQUIRE_CLUSTER"
NO_CLUSTER = "no cluster here"
NAME = os.environ.get("SPOTUNE_TESTCLUSTER", "tests")
FOR_TESTS = re.compile(r"(^|[^a-z0-9])(test|tests|testing|testcluster|e2e|ci|kind|k3d|minikube)([^a-z0-9]|$)")
HOW_TO_RUN = "run them with `make test-cluster` on Debian as root (packages: `make cluster-packages`)"
# The nodes that every test can rely on: one on-demand node, two spot nodes with a GPU each.
NODES = (
    NodeSettings(number=1, provider=Provider.AKS, zone="westeurope-1"),
    NodeSettings(number=2, provider=Provider.AKS, capacity=Capacity.SPOT, gpus=1, zone="westeurope-1"),
    NodeSettings(number=3, provider=Provider.AKS, capacity=Capacity.SPOT, gpus=1, zone="westeurope-2"),
)

_reason_not_to_run = pytest.StashKey[str]()
_timings = pytest.StashKey[dict[str, float]]()


class NotForTestsError(ClusterError):
    """The name of the kubeconfig's context does not mark its cluster as one for tests."""


@dataclass(frozen=True)
class ClusterUnderTest:
    """The cluster that tests run on.

    Attributes:
        kubectl: kubectl with the rights of the administrator.
        machine: The cluster on this machine, None for a cluster of SPOTUNE_TEST_KUBECONFIG.
        image: An image with the trainer's environment, Python and Ray.
        storage_class: A storage class with ReadWriteMany volumes.
        nodes: Names of nodes for pods; on this machine those of `NODES`.
    """

    kubectl: Kubectl
    machine: Cluster | None
    image: str
    storage_class: str
    nodes: Sequence[str]

    def machine_for(self, what: str) -> Cluster:
        """The cluster on this machine. On another cluster, skip the test because `what` needs this machine."""
        if self.machine is None:
            pytest.skip(f"{what} needs a cluster on this machine, but {FOREIGN} is set")
        return self.machine


@dataclass
class Fault:
    """Faults of the cluster on this machine. They are undone after the test.

    On a cluster of SPOTUNE_TEST_KUBECONFIG, a fault skips the test and is named as the reason.
    """

    cluster: ClusterUnderTest
    _mend: list[Callable[[], None]] = field(default_factory=list)

    def crash_node(self, node: str) -> None:
        """Send SIGKILL to all processes of a node."""
        machine = self._machine("crash_node")
        self._mend.append(lambda: machine.start_node(node))
        machine.crash_node(node)

    def stop_node(self, node: str, seconds: float) -> None:
        """Send SIGTERM to all containers of a node, and end the node after `seconds`."""
        machine = self._machine("stop_node")
        self._mend.append(lambda: machine.start_node(node))
        machine.stop_node(node, seconds)

    def start_node(self, node: str) -> None:
        """Start a crashed or stopped node again."""
        self._machine("start_node").start_node(node)

    def stop_component(self, component: str) -> None:
        """Stop a component of the control plane, such as kuberay-operator."""
        machine = self._machine("stop_component")
        self._mend.append(lambda: machine.component("start", component))
        machine.component("stop", component)

    def start_component(self, component: str) -> None:
        """Start a stopped component."""
        self._machine("start_component").component("start", component)

    def restart_api_server(self) -> None:
        """Restart the API server and wait until it answers."""
        self._machine("restart_api_server").component("restart", "kube-apiserver")

    def pause_api_server(self) -> None:
        """Freeze the API server."""
        machine = self._machine("pause_api_server")
        self._mend.append(self.continue_api_server)
        machine.component("pause", "kube-apiserver")

    def continue_api_server(self) -> None:
        """Continue the paused API server."""
        self._machine("continue_api_server").component("continue", "kube-apiserver")

    def cut(self, target: str) -> None:
        """Cut a node, or a Service's pods (`namespace/name`), off the network."""
        machine = self._machine("cut")
        self._mend.append(lambda: faults.restore(machine, target))
        faults.cut(machine, target)

    def restore(self, target: str) -> None:
        """Undo a cut."""
        faults.restore(self._machine("restore"), target)

    def throttle(self, node: str, rate: str) -> None:
        """Limit what a node sends and receives, to a rate such as 80mbit."""
        machine = self._machine("throttle")
        self._mend.append(lambda: faults.end_throttle(machine, node))
        faults.throttle(machine, node, rate)

    def set_gpu(self, node: str, gpu: str, state: str) -> None:
        """Make a GPU healthy, failed or lost."""
        machine = self._machine("set_gpu")
        self._mend.append(lambda: machine.set_gpu(node, gpu, "healthy"))
        machine.set_gpu(node, gpu, state)

    def set_volume(self, volume: str, state: volumes.VolumeState) -> None:
        """Make a PersistentVolume read-only, slow or normal."""
        machine = self._machine("set_volume")
        self._mend.append(lambda: volumes.set_state(machine, volume, volumes.VolumeState.NORMAL))
        volumes.set_state(machine, volume, state)

    def mend(self) -> None:
        """Undo all faults, the last one first."""
        while self._mend:
            self._mend.pop()()

    def _machine(self, fault: str) -> Cluster:
        return self.cluster.machine_for(f"fault {fault}")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and check once whether cluster tests can run here."""
    config.addinivalue_line("markers", f"cluster: needs a Kubernetes cluster: this machine's, or {FOREIGN}'s")
    config.stash[_timings] = {}
    config.stash[_reason_not_to_run] = _why_not()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cluster tests last, so that other tests have the machine to themselves, or skip them."""
    items.sort(key=_turn)
    reason = config.stash[_reason_not_to_run]
    chosen = [item for item in items if item.get_closest_marker("cluster")]
    if not reason or not chosen:
        return
    if os.environ.get(REQUIRED):
        raise pytest.UsageError(f"cluster tests are required ({REQUIRED} is set) and cannot run here: {reason}")
    for item in chosen:
        item.add_marker(pytest.mark.skip(reason=f"{NO_CLUSTER}: {reason}"))


def _turn(item: pytest.Item) -> tuple[bool, bool]:
    """Sort key: first tests without a cluster, then those that start their own, then those that share one."""
    return item.get_closest_marker("cluster") is not None, "cluster" in getattr(item, "fixturenames", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print a line about skipped cluster tests, or the measured times."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "no cluster here" in str(report.longrepr)
    ]
    if skipped:
        reason = config.stash[_reason_not_to_run]
        terminalreporter.write_line(f"{len(skipped)} cluster tests were skipped: {reason}; {HOW_TO_RUN}")
    for what, seconds in config.stash[_timings].items():
        terminalreporter.write_line(f"cluster: {what} took {seconds:.1f} s")


@pytest.fixture(scope="session")
def took(pytestconfig: pytest.Config) -> dict[str, float]:
    """Measured times in seconds by their names; printed at the end."""
    return pytestconfig.stash[_timings]


@pytest.fixture(scope="session")
def cluster(took: dict[str, float]) -> Iterator[ClusterUnderTest]:
    """The cluster that all tests of this run share."""
    if kubeconfig := os.environ.get(FOREIGN):
        yield foreign_cluster(Path(kubeconfig))
        return
    machine = Cluster(NAME)
    if not os.environ.get(KEEP):
        machine.down()
    start = time.monotonic()
    machine.up(NODES, report=lambda _line: None)
    took["up with 3 nodes"] = time.monotonic() - start
    names = [node.name for node in NODES]
    yield ClusterUnderTest(machine.kubectl, machine, "testcluster.local/trainer:1", "shared", names)
    if not os.environ.get(KEEP):
        start = time.monotonic()
        machine.down()
        took["down"] = time.monotonic() - start


@pytest.fixture
def namespace(cluster: ClusterUnderTest) -> Iterator[Kubectl]:
    """Kubectl with a new namespace for this test."""
    with temporary_namespace(cluster.kubectl) as found:
        yield found


@pytest.fixture
def fault(cluster: ClusterUnderTest) -> Iterator[Fault]:
    """Faults, undone after the test."""
    broken = Fault(cluster)
    yield broken
    broken.mend()


@contextmanager
def temporary_namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Kubectl with a new namespace, which is deleted at the end of the block."""
    name = f"test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    try:
        yield kubectl.within(name)
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


def foreign_cluster(kubeconfig: Path) -> ClusterUnderTest:
    """The cluster of a given kubeconfig.

    Raises:
        NotForTestsError: The name of its context does not mark it as a cluster for tests.
        ClusterError: The image or the storage class is not set.
    """
    kubectl = Kubectl("kubectl", kubeconfig)
    context = kubectl("config", "current-context").strip()
    refuse_if_not_for_tests(context)
    image = os.environ.get("SPOTUNE_TEST_IMAGE", "")
    storage_class = os.environ.get("SPOTUNE_TEST_STORAGE_CLASS", "")
    if not image or not storage_class:
        raise ClusterError(
            f"{FOREIGN} needs two more variables: SPOTUNE_TEST_IMAGE (an image with Python and Ray) and "
            "SPOTUNE_TEST_STORAGE_CLASS (with ReadWriteMany volumes)"
        )
    nodes = [node["metadata"]["labels"]["kubernetes.io/hostname"] for node in kubectl.get("nodes")]
    return ClusterUnderTest(kubectl, None, image, storage_class, nodes)


def refuse_if_not_for_tests(context: str) -> None:
    """Raise NotForTestsError unless the context's name contains a word such as test, e2e, ci or kind."""
    if not FOR_TESTS.search(context.lower()):
        raise NotForTestsError(
            f"context {context!r} does not say that it is for tests, and tests break things: choose one whose name "
            "contains `test`, `e2e`, `ci`, `kind`, `k3d` or `minikube`"
        )


def _why_not() -> str:
    """The reason why cluster tests cannot run here, "" if they can."""
    if os.environ.get(FOREIGN):
        return ""
    try:
        requirements.check()
        if not binaries.are_built(Home.default().root):
            requirements.check_go()
            return "Kubernetes is not built yet (make cluster-build)"
    except CannotRunHereError as error:
        return str(error)
    return ""


def conditions(thing: dict[str, Any]) -> dict[str, str]:
    """An object's conditions as {type: status}."""
    return {condition["type"]: condition["status"] for condition in thing.get("status", {}).get("conditions", [])}
