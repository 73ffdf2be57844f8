"""A RayCluster for tests, as users of KubeRay write it, and its dashboard through the API server's proxy."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import conditions
from spotune_testcluster.waiting import wait_for

RAY = "2.60.0"
SECONDS_TO_BE_READY = 240.0
SECONDS_TO_ANSWER = 30.0  # a new head takes seconds for its first job
DRAIN_SECONDS = 20
# A pod on a lost node is evicted after this time instead of Kubernetes' 300 s.
TOLERATIONS = [
    {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Exists"},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3},
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3},
]
HEAD_PORTS = [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]


def ray_cluster(name: str, image: str, workers: int) -> dict[str, Any]:
    """A head and `workers` workers on different nodes, with token authentication and short timeouts for recovery."""
    apart = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"ray.io/cluster": name}}, "topologyKey": "kubernetes.io/hostname"}
        ]
    }
    worker_environment = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        "RAY_raylet_liveness_self_check_interval_ms": "1000",
    }
    head = _pod("ray-head", image, {}, apart, grace=5)
    head["spec"]["containers"][0]["ports"] = HEAD_PORTS
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name},
        "spec": {
            "rayVersion": RAY,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"}, "template": head},
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": workers,
                    "minReplicas": workers,
                    "maxReplicas": workers,
                    "rayStartParams": {"num-cpus": "1"},
                    "template": _pod("ray-worker", image, worker_environment, apart, grace=DRAIN_SECONDS + 10),
                }
            ],
        },
    }


def _pod(name: str, image: str, environment: dict[str, str], apart: dict[str, Any], grace: int) -> dict[str, Any]:
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "3Gi"}},
    }
    spec = {
        "terminationGracePeriodSeconds": grace,
        "tolerations": TOLERATIONS,
        "affinity": {"podAntiAffinity": apart},
        "containers": [container],
    }
    return {"spec": spec}


@dataclass(frozen=True)
class RayCluster:
    """A RayCluster in a namespace, with address and token of its dashboard."""

    kubectl: Kubectl
    name: str
    proxy: str
    token: str

    def head(self) -> dict[str, Any]:
        """The head pod that is not being deleted."""
        (found,) = [pod for pod in self.pods("head") if "deletionTimestamp" not in pod["metadata"]]
        return found

    def workers(self) -> list[dict[str, Any]]:
        """The worker pods, by name."""
        return self.pods("worker")

    def pods(self, kind: str) -> list[dict[str, Any]]:
        """The pods of one kind, including those that are being deleted."""
        selector = f"--selector=ray.io/cluster={self.name},ray.io/node-type={kind}"
        found: list[dict[str, Any]] = self.kubectl.get("pods", selector)
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def wait_until_ready(self, workers: int, seconds: float = SECONDS_TO_BE_READY) -> None:
        """Wait until head and workers are Ready and Ray lists all of them as alive."""

        def ready() -> bool:
            pods = self.pods("head") + self.workers()
            up = [pod for pod in pods if conditions(pod).get("Ready") == "True" and not _ends(pod)]
            return len(pods) == len(up) == workers + 1 and len(self.alive()) == workers + 1

        wait_for(f"RayCluster {self.name} with {workers} workers", seconds, ready, every=0.5)

    def alive(self) -> list[str]:
        """The addresses of the nodes that Ray lists as alive; none while the dashboard is unavailable."""
        status, answer = self.ask("GET", "/api/v0/nodes")
        if status != 200:
            return []
        nodes = json.loads(answer)["data"]["result"]["result"]
        return sorted(node["node_ip"] for node in nodes if node["state"] == "ALIVE")

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> tuple[int, str]:
        """Send a request to the dashboard; returns status and text of the response, or 0 and the error.

        Args:
            method: GET, POST, ...
            path: Path below the dashboard's address.
            body: The body, sent as JSON.
            token: A token instead of the cluster's own; "" for none.
        """
        service = f"/api/v1/namespaces/{self.kubectl.namespace}/services/{self.name}-head-svc:dashboard/proxy"
        request = urllib.request.Request(self.proxy + service + path, method=method)
        request.add_header("Content-Type", "application/json")
        sent = self.token if token is None else token
        if sent:  # the API server does not forward `Authorization`
            request.add_header("X-Ray-Authorization", f"Bearer {sent}")
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, data, timeout=SECONDS_TO_ANSWER) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def submit(self, entrypoint: str, submission_id: str) -> tuple[int, str]:
        """Submit a job; returns status and text of the response."""
        return self.ask("POST", "/api/jobs/", {"entrypoint": entrypoint, "submission_id": submission_id})

    def wait_for_job(self, submission_id: str, seconds: float = 240) -> str:
        """Wait until a job has ended; returns its status (SUCCEEDED, FAILED or STOPPED)."""

        def ended() -> str | None:
            status, answer = self.ask("GET", f"/api/jobs/{submission_id}")
            found: str = json.loads(answer)["status"] if status == 200 else ""
            return found if found in {"SUCCEEDED", "FAILED", "STOPPED"} else None

        return wait_for(f"end of Ray job {submission_id}", seconds, ended, every=0.3)

    def job_log(self, submission_id: str) -> str:
        """The output of a job."""
        status, answer = self.ask("GET", f"/api/jobs/{submission_id}/logs")
        return str(json.loads(answer)["logs"]) if status == 200 else ""


@contextmanager
def started(kubectl: Kubectl, manifest: dict[str, Any]) -> Iterator[RayCluster]:
    """A RayCluster with one worker group, ready; deleted at the end of the block."""
    kubectl.apply(manifest)
    name, workers = manifest["metadata"]["name"], manifest["spec"]["workerGroupSpecs"][0]["replicas"]
    with api_proxy(kubectl) as proxy:
        secret = wait_for("the token's Secret", 60, lambda: _token(kubectl, name), every=0.3)
        cluster = RayCluster(kubectl, name, proxy, secret)
        cluster.wait_until_ready(workers)
        yield cluster
    kubectl("delete", "raycluster", name, "--wait=false")


@contextmanager
def api_proxy(kubectl: Kubectl) -> Iterator[str]:
    """A local address that forwards to the API server with the credentials of the kubeconfig."""
    command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line)
        assert found, f"kubectl proxy said {line!r}"
        try:
            yield f"http://{found.group()}"
        finally:
            process.terminate()


def _token(kubectl: Kubectl, name: str) -> str:
    found = kubectl(
        "get", "secret", name, "--ignore-not-found", "--output=go-template={{.data.auth_token | base64decode}}"
    )
    return found.strip()


def _ends(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]
