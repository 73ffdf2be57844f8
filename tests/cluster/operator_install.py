"""The operator as a user installs it, by the chart as a Deployment in spotune-system, and faults of it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster import chart
from tests.cluster.chart import NAMESPACE
from tests.cluster.containers import kill_container, wait_for_restart

DEPLOYMENT = "spotune-operator"
CONTAINER = "operator"
SECONDS_TO_BE_READY = 180.0
_SELECTOR = "--selector=app.kubernetes.io/name=spotune,app.kubernetes.io/component=operator"


@dataclass(frozen=True)
class Operator:
    """The installed operator.

    Attributes:
        cluster: The cluster.
        kubectl: kubectl in the namespace of the operator.
        replaced: Pods of earlier releases, with the time since which their rights may be gone.
    """

    cluster: ClusterUnderTest
    kubectl: Kubectl
    replaced: dict[str, float] = field(default_factory=dict, compare=False)

    def pods(self) -> list[dict[str, Any]]:
        """Its pods that are not being deleted."""
        found: list[dict[str, Any]] = self.kubectl.get("pods", _SELECTOR)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pod(self) -> dict[str, Any]:
        """Wait for the running pod and return it."""

        def running() -> dict[str, Any] | None:
            return next((pod for pod in self.pods() if pod["status"].get("phase") == "Running"), None)

        return wait_for("the operator's pod", SECONDS_TO_BE_READY, running, every=0.3)

    def wait_until_ready(self) -> None:
        """Wait until the operator is ready: all its caches are filled."""
        limit = f"--timeout={SECONDS_TO_BE_READY:.0f}s"
        self.kubectl("rollout", "status", f"deployment/{DEPLOYMENT}", limit, timeout=SECONDS_TO_BE_READY + 20)

    def log(self) -> str:
        """The log of the operator since its last start."""
        return self.kubectl("logs", f"deployment/{DEPLOYMENT}", "--tail=-1")

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """`kill -9` of the process; waits until the kubelet has restarted it."""
        pod = self.pod()
        kill_container(self.cluster.machine_for("kill -9 of a container"), pod, CONTAINER)
        wait_for_restart(self.kubectl, pod, CONTAINER)

    def delete_pod(self) -> None:
        """Delete the pod; the Deployment creates another."""
        self.kubectl("delete", "pods", _SELECTOR, "--wait=false")

    def stop(self) -> None:
        """Scale the operator to zero until `start`."""
        self.kubectl("scale", f"deployment/{DEPLOYMENT}", "--replicas=0")
        wait_for("the end of the operator", 60, lambda: not self.kubectl.get("pods", _SELECTOR), every=0.3)

    def start(self) -> None:
        """Scale the operator to one, and wait until it is ready."""
        self.kubectl("scale", f"deployment/{DEPLOYMENT}", "--replicas=1")
        self.wait_until_ready()

    @contextmanager
    def cut_off_from_pods(self) -> Iterator[None]:
        """Until the block ends, the operator reaches only the API server."""
        egress = self.kubectl.get("networkpolicy", DEPLOYMENT)["spec"]["egress"]
        self._let_out([{"to": [{"ipBlock": {"cidr": f"{address}/32"}} for address in self._api_server_addresses()]}])
        try:
            yield
        finally:
            self._let_out(egress)

    def _let_out(self, rules: list[dict[str, Any]]) -> None:
        patch = json.dumps([{"op": "replace", "path": "/spec/egress", "value": rules}])
        self.kubectl("patch", "networkpolicy", DEPLOYMENT, "--type=json", f"--patch={patch}")

    @contextmanager
    def with_values(self, *values: str) -> Iterator[None]:
        """Until the block ends, the operator has further values such as `healing.cordon=true`."""
        self.install(*values)
        try:
            yield
        finally:
            self.install()

    def install(self, *values: str) -> None:
        """Install the operator, or upgrade it to other values. It runs in the trainer image, which contains it."""
        self._note_end_of_rights()
        chart.install(self.kubectl, self.cluster.image, *values)
        for pod in self.pods():  # new, or the same as before
            self.replaced.pop(pod["metadata"]["name"], None)

    def uninstall(self) -> None:
        """Uninstall the operator; does not wait until its pod is gone."""
        self._note_end_of_rights()
        chart.uninstall(self.kubectl)

    def _note_end_of_rights(self) -> None:
        """Helm changes the roles before the Deployment: a pod may still send a request that its new role forbids."""
        self.replaced.update(dict.fromkeys((pod["metadata"]["name"] for pod in self.pods()), time.time()))

    def roll_back(self) -> None:
        """Roll back to the previous release."""
        chart.roll_back(self.kubectl)

    def _api_server_addresses(self) -> list[str]:
        default = self.kubectl.within("default")

        def look() -> list[str]:
            slices = default.get("endpointslices", "--selector=kubernetes.io/service-name=kubernetes")
            points = [point for found in slices for point in found["endpoints"] or []]
            return [address for point in points for address in point["addresses"]]

        return wait_for("the addresses of the API server, which may be starting", 60, look, every=0.5)


@contextmanager
def installed(cluster: ClusterUnderTest) -> Iterator[Operator]:
    """The operator, ready; uninstalled at the end of the block."""
    metadata = {"name": NAMESPACE, "labels": RESTRICTED}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    operator = Operator(cluster, cluster.kubectl.within(NAMESPACE))
    operator.install()
    try:
        yield operator
    finally:
        operator.uninstall()


@contextmanager
def no_operator(cluster: ClusterUnderTest) -> Iterator[None]:
    """Until the block ends, there is no operator but those of the test. An installed one is stopped meanwhile."""
    kubectl = cluster.kubectl.within(NAMESPACE)
    is_there = bool(kubectl("get", "deployment", DEPLOYMENT, "--ignore-not-found"))
    operator = Operator(cluster, kubectl)
    if is_there:
        operator.stop()
    try:
        yield
    finally:
        if is_there:
            operator.start()


RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
