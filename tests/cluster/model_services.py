"""ModelServices on the cluster: a tiny model on the volume of the workplace, and clients of its endpoint."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from spotune_operator.children.ports import DASHBOARD
from spotune_testcluster import network
from spotune_testcluster.errors import DidNotStartError
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import CLAIM, SMALL, Workplace
from tests.serve.support.exported import export_tiny_model

MODEL_FOLDER = "served"
SECONDS_TO_SERVE = 600.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class RunningService:
    """A ModelService that was applied.

    Attributes:
        kubectl: kubectl in its namespace.
        name: Its name.
    """

    kubectl: Kubectl
    name: str

    @property
    def children(self) -> str:
        """Name of all its children."""
        return f"spotunems-{self.name}"

    def status(self) -> dict[str, Any]:
        """Its status; {} before the first reconcile."""
        found: dict[str, Any] = self.kubectl.get("modelservice", self.name).get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of a type; {} if there is none."""
        found = [condition for condition in self.status().get("conditions", []) if condition["type"] == kind]
        return found[0] if found else {}

    def wait_until_ready(self, replicas: int) -> dict[str, Any]:
        """Wait until the endpoint answers with this number of ready replicas; returns the status that says so."""

        def ready() -> dict[str, Any] | None:
            status = self.status()
            states = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
            return status if states.get("Ready") == "True" and status["readyReplicas"] == replicas else None

        try:
            return wait_for(f"ModelService {self.name} with {replicas} replicas", SECONDS_TO_SERVE, ready, every=1)
        except DidNotStartError as error:
            error.add_note(f"its status was: {self.status()}")
            raise

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Its pods of a component that are not being deleted."""
        labels = f"--selector=spotune.dev/service={self.name},app.kubernetes.io/component={component}"
        found: list[dict[str, Any]] = self.kubectl.get("pods", labels)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """A client without retries, connected through a port-forward to the Service."""
        access = [f"--kubeconfig={self.kubectl.kubeconfig}", f"--namespace={self.kubectl.namespace}"]
        command = [self.kubectl.program, *access, "port-forward", f"service/{self.children}", ":80"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
            try:
                assert forward.stdout is not None
                found = _FORWARDING.match(forward.stdout.readline())
                assert found is not None, "kubectl port-forward ended"
                url = f"http://127.0.0.1:{found[1]}/v1"
                with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                    yield client
            finally:
                forward.terminate()


def service_manifest(workplace: Workplace, name: str, **spec: Any) -> dict[str, Any]:
    """A ModelService of the model in `MODEL_FOLDER`, with parts of its spec replaced."""
    provider = "aks" if workplace.cluster.machine else "none"
    given = {
        "model": model_on_claim(MODEL_FOLDER),
        "replicas": {"min": 2, "max": 2},
        "gpus": 0,
        "resources": SMALL,
        "gateway": {"resources": SMALL},
        "cluster": {"provider": provider, "image": workplace.cluster.image},
    }
    metadata = {"name": name, "namespace": workplace.kubectl.namespace}
    return {"apiVersion": "spotune.dev/v1alpha1", "kind": "ModelService", "metadata": metadata, "spec": given | spec}


def add_model(workplace: Workplace, folder: str = MODEL_FOLDER, *, without: str = "") -> None:
    """Put a tiny T5 with random weights into a folder on the volume of the workplace; `without` leaves out a file."""
    exported = export_tiny_model(workplace.inputs / folder, "seq2seq")
    if without:
        (exported / without).unlink()
    workplace.add_input(folder)


def model_on_claim(folder: str) -> dict[str, Any]:
    """`spec.model` for a model that `add_model` has put there; its version is `inputs/` and the folder."""
    return {"claim": {"name": CLAIM, "path": f"inputs/{folder}"}}


@contextmanager
def running_service(workplace: Workplace, manifest: dict[str, Any]) -> Iterator[RunningService]:
    """A service that is applied, and deleted with its pods at the end of the block."""
    service = RunningService(workplace.kubectl, manifest["metadata"]["name"])
    admit_kuberay(workplace, service)
    workplace.kubectl.apply(manifest)
    try:
        yield service
    finally:
        workplace.kubectl("delete", "modelservice", service.name, "--ignore-not-found")
        delete_pods(service)


def delete_pods(service: RunningService) -> None:
    """Delete the pods of a deleted service without their grace period, and wait for their end."""
    labels = f"--selector=spotune.dev/service={service.name}"
    service.kubectl("delete", "pods", labels, "--force", "--grace-period=0", "--ignore-not-found")
    wait_for("the end of the service's pods", 120, lambda: not service.kubectl.get("pods", labels), every=1)


def admit_kuberay(workplace: Workplace, service: RunningService) -> None:
    """Let the KubeRay of the test cluster reach the pods of a service."""
    if workplace.cluster.machine:
        workplace.kubectl.apply(_kuberay_policy(service))


def _kuberay_policy(service: RunningService) -> dict[str, Any]:
    """Admits the KubeRay of the test cluster to Ray's dashboard: it is a process of the control plane, and no pod."""
    rule = {"from": [{"ipBlock": {"cidr": f"{network.CONTROL_PLANE}/32"}}], "ports": [{"port": DASHBOARD.number}]}
    selector = {"matchLabels": {"spotune.dev/service": service.name}}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
    metadata = {"name": "kuberay"}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
