"""The operator as a user installs it: manifests/ applied, a Deployment in spotune-system; and what can befall it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.containers import kill_container, wait_for_restart

NAMESPACE = "spotune-system"
DEPLOYMENT = "spotune-operator"
CONTAINER = "operator"
MANIFESTS = Path(__file__).parent.parent.parent / "manifests"
SECONDS_TO_BE_READY = 180.0
_SELECTOR = "--selector=app.kubernetes.io/name=spotune,app.kubernetes.io/component=operator"
_OFF = "operator-cut-off"


@dataclass(frozen=True)
class Operator:
    """The installed operator.

    Attributes:
        cluster: That it is on.
        kubectl: In its namespace.
    """

    cluster: ClusterUnderTest
    kubectl: Kubectl

    def pods(self) -> list[dict[str, Any]]:
        """Its pods that are not being deleted."""
        found: list[dict[str, Any]] = self.kubectl.get("pods", _SELECTOR)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pod(self) -> dict[str, Any]:
        """The pod that runs; waits for it."""

        def running() -> dict[str, Any] | None:
            return next((pod for pod in self.pods() if pod["status"].get("phase") == "Running"), None)

        return wait_for("the operator's pod", SECONDS_TO_BE_READY, running, every=0.3)

    def wait_until_ready(self) -> None:
        """Wait until it knows all that its decisions need."""
        limit = f"--timeout={SECONDS_TO_BE_READY:.0f}s"
        self.kubectl("rollout", "status", f"deployment/{DEPLOYMENT}", limit, timeout=SECONDS_TO_BE_READY + 20)

    def log(self) -> str:
        """What it has printed since it was started last."""
        return self.kubectl("logs", f"deployment/{DEPLOYMENT}", "--tail=-1")

    # -- what can befall it -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """`kill -9` of its process; returns once the kubelet has started another."""
        pod = self.pod()
        kill_container(self.cluster.machine_for("kill -9 of a container"), pod, CONTAINER)
        wait_for_restart(self.kubectl, pod, CONTAINER)

    def delete_pod(self) -> None:
        """Delete its pod; the Deployment makes another."""
        self.kubectl("delete", "pods", _SELECTOR, "--wait=false")

    def stop(self) -> None:
        """Have none until `start`."""
        self.kubectl("scale", f"deployment/{DEPLOYMENT}", "--replicas=0")
        wait_for("the end of the operator", 60, lambda: not self.kubectl.get("pods", _SELECTOR), every=0.3)

    def start(self) -> None:
        """Have one again, ready."""
        self.kubectl("scale", f"deployment/{DEPLOYMENT}", "--replicas=1")
        self.wait_until_ready()

    @contextmanager
    def cut_off_from_pods(self) -> Iterator[None]:
        """It reaches the API server and nothing else, until the block ends."""
        self.kubectl.apply(_nothing_but(self._api_server_addresses()))
        try:
            yield
        finally:
            self.kubectl("delete", "networkpolicy", _OFF)

    @contextmanager
    def with_settings(self, **settings: str) -> Iterator[None]:
        """It has settings such as `monitoring_namespace="monitoring"` until the block ends."""
        names = {f"SPOTUNE_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        self._set_environment(*(f"{name}={value}" for name, value in names.items()))
        try:
            yield
        finally:
            self._set_environment(*(f"{name}-" for name in names))

    @contextmanager
    def healing_nodes(self, **settings: str) -> Iterator[None]:
        """It may do to nodes what settings such as `cordon="true"` allow, until the block ends."""
        self.kubectl.apply(*_objects("operator-healing.yaml"))
        try:
            with self.with_settings(**{f"heal_{name}": value for name, value in settings.items()}):
                yield
        finally:
            self.kubectl("delete", f"--filename={MANIFESTS / 'operator-healing.yaml'}")

    def _set_environment(self, *changes: str) -> None:
        self.kubectl("set", "env", f"deployment/{DEPLOYMENT}", *changes)
        self.wait_until_ready()

    def _api_server_addresses(self) -> list[str]:
        default = self.kubectl.within("default")
        slices = default.get("endpointslices", "--selector=kubernetes.io/service-name=kubernetes")
        return [address for found in slices for point in found["endpoints"] for address in point["addresses"]]


@contextmanager
def installed(cluster: ClusterUnderTest) -> Iterator[Operator]:
    """The operator with the trainer's image, which has it in it, ready; taken away when the block ends."""
    kubectl = cluster.kubectl
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={MANIFESTS / 'crd.yaml'}")
    kubectl("wait", "--for=condition=Established", "crd/finetunejobs.spotune.dev", "--timeout=20s")
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": _RESTRICTED}})
    operator = Operator(cluster, kubectl.within(NAMESPACE))
    operator.kubectl.apply(*(_with_image(found, cluster.image) for found in _objects("operator.yaml")))
    try:
        operator.wait_until_ready()
        yield operator
    finally:
        operator.kubectl("delete", f"--filename={MANIFESTS / 'operator.yaml'}", "--wait=false")


@contextmanager
def no_operator(cluster: ClusterUnderTest) -> Iterator[None]:
    """No operator but those of the test until the block ends; one that is installed goes, and comes back."""
    kubectl = cluster.kubectl.within(NAMESPACE)
    is_there = bool(kubectl("get", "deployment", DEPLOYMENT, "--ignore-not-found"))
    operator = Operator(cluster, kubectl)
    if is_there:
        operator.stop()
    yield
    if is_there:
        operator.start()


_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def _objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def _with_image(found: dict[str, Any], image: str) -> dict[str, Any]:
    if found["kind"] == "Deployment":
        found["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return found


def _nothing_but(addresses: list[str]) -> dict[str, Any]:
    """A NetworkPolicy by which the operator's pods may connect to these addresses alone."""
    policy = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": {"cidr": f"{address}/32"}} for address in addresses]}],
    }
    metadata = {"name": _OFF}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy}
