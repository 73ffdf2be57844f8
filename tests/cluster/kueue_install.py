"""A real Kueue in the test cluster, built from its Go module and installed by its own chart."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from spotune_testcluster import binaries, oci
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.home import Home
from spotune_testcluster.images import load_image
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster import chart

NAMESPACE = "kueue-system"
VERSION = "v1beta1"
API = f"kueue.x-k8s.io/{VERSION}"
QUEUE = "team"
FLAVOR = "default-flavor"
_IMAGE = "testcluster.local/kueue"
_TAG = "1"
_MODULE = binaries.Module("kueue", {"sigs.k8s.io/kueue/cmd/kueue": "kueue"})
_SECONDS = 180
_CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "clientConnection": {"qps": 50, "burst": 100},
    "integrations": {"frameworks": ["ray.io/raycluster", "batch/job"]},
}
_VALUES = {
    "controllerManager": {
        "featureGates": [{"name": "ElasticJobsViaWorkloadSlices", "enabled": True}],
        "manager": {
            "image": {"repository": _IMAGE, "tag": _TAG, "pullPolicy": "Never"},
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {}},
        },
        "readinessProbe": {"initialDelaySeconds": 1, "periodSeconds": 1, "failureThreshold": 60},
    },
    "managerConfig": {"controllerManagerConfigYaml": yaml.safe_dump(_CONFIGURATION)},
}


@contextmanager
def installed(cluster: ClusterUnderTest) -> Iterator[None]:
    """Kueue in the cluster, removed afterwards with all its objects."""
    machine = cluster.machine_for("an image of Kueue")
    _load_image(machine)
    kubectl = cluster.kubectl
    where = (f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={NAMESPACE}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as values:
        yaml.safe_dump(_VALUES, values)
        values.flush()
        flags = ("--install", "--create-namespace", "--wait", f"--timeout={_SECONDS}s", f"--values={values.name}")
        chart.helm("upgrade", "kueue", str(_sources() / "charts/kueue"), *flags, *where)
    try:
        yield
    finally:
        kinds = ("localqueues", "clusterqueues", "workloads", "resourceflavors", "workloadpriorityclasses")
        for kind in kinds:  # Kueue itself removes their finalizers, so it has to run still
            kubectl("delete", f"{kind}.kueue.x-k8s.io", "--all", "--all-namespaces", "--timeout=60s", timeout=70)
        chart.helm("uninstall", "kueue", "--wait", f"--timeout={_SECONDS}s", *where)


def _sources() -> Path:
    """The folder of Kueue's Go module."""
    command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue"]
    found = subprocess.run(command, cwd=_MODULE.path, capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


def _load_image(machine: Cluster) -> None:
    program = binaries.build_module(Home.default().root, _MODULE) / "kueue"
    with tempfile.TemporaryDirectory() as folder:
        layer, archive = Path(folder) / "layer.tar", Path(folder) / "image.tar"
        oci.write_layer(layer, {"manager": (program.read_bytes(), 0o755)})
        oci.write_archive(
            [oci.Image(f"{_IMAGE}:{_TAG}", [layer], entrypoint=["/manager"], user="65532:65532")], archive
        )
        for node, running in machine.nodes().items():
            if running:
                load_image(machine.way_in(node), archive)


def flavor() -> dict[str, Any]:
    """A ResourceFlavor of any node."""
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": FLAVOR}}


def cluster_queue(name: str, pods: int) -> dict[str, Any]:
    """A ClusterQueue with a quota of pods, in which higher priorities preempt lower ones."""
    quota = {"pods": str(pods), "cpu": "1000", "memory": "1000Gi"}
    resources = [{"name": each, "nominalQuota": amount} for each, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": FLAVOR, "resources": resources}]}
    return {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [group],
        },
    }


def local_queue(name: str, cluster_queue_name: str) -> dict[str, Any]:
    """The LocalQueue of a namespace."""
    return {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": name},
        "spec": {"clusterQueue": cluster_queue_name},
    }


def priority_class(name: str, value: int) -> dict[str, Any]:
    """A WorkloadPriorityClass."""
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}


def admitted(kubectl: Kubectl) -> dict[str, bool]:
    """Whether each workload of the namespace that has not finished is admitted, by its name."""
    found: list[dict[str, Any]] = kubectl.get(f"workloads.{VERSION}.kueue.x-k8s.io")
    conditions = {
        each["metadata"]["name"]: {
            condition["type"]: condition["status"] for condition in each.get("status", {}).get("conditions", ())
        }
        for each in found
    }
    return {name: held.get("Admitted") == "True" for name, held in conditions.items() if held.get("Finished") != "True"}
