"""A private Ray with Ray Serve in a process of its own. A test deploys configurations in it, as KubeRay does."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_PATIENCE_SECONDS = 180.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_RESOURCES = {"spotune_gateway": 1.0, "spotune_replica": 2.0}
_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "180000",
}


class RayServe:
    """Ray Serve on this machine, with an HTTP client of its gateway.

    Args:
        nodes: the resources of each Ray node beside the head, which has none then; empty: the head runs everything.
        environment: variables of all processes, besides those of this one.

    Attributes:
        client: asks the gateway.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]] = (), environment: Mapping[str, str] = {}) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port: int = listener.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps([dict(node) for node in nodes])],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=_PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        try:
            self._process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Deploy these applications and no others. Returns when Ray Serve has taken the configuration."""
        self.deploy_config({"applications": list(applications)})

    def deploy_config(self, config: dict[str, Any]) -> None:
        """Deploy the content of a serveConfigV2, and nothing else.

        Pods have ports of their own, and the nodes of this machine share them: there is one gateway, on another port.
        """
        self._ask(
            "deploy", config | {"applications": [self._with_one_gateway(each) for each in config["applications"]]}
        )

    def add_node(self, resources: Mapping[str, float]) -> None:
        """Start one more Ray node; its number follows that of the last one."""
        self._ask("add_node", dict(resources))

    def drain_node(self, number: int, seconds: float) -> None:
        """Announce that a node leaves, as `ray drain-node` does.

        Args:
            number: of the node, from 0 on, in the order in which they were started.
            seconds: until it leaves.
        """
        assert self._ask("drain_node", [number, seconds]), "the node refuses to leave"

    def ongoing_requests(self, deployment: str) -> dict[int, int]:
        """Number of requests that each running replica has, by the number of its node; -1 is the head."""
        return {int(node): count for node, count in self._ask("ongoing_requests", deployment).items()}

    def _with_one_gateway(self, application: dict[str, Any]) -> dict[str, Any]:
        if not application["import_path"].endswith("build_gateway"):
            return application
        deployments = [each | {"num_replicas": 1} for each in application["deployments"]]
        return application | {"args": application["args"] | {"port": self._port}, "deployments": deployments}

    def wait_until_running(self) -> dict[str, int]:
        """Wait until all applications run; returns the number of running replicas of each deployment, by its name."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            applications = self._ask("states")
            failed = [each["message"] for each in applications if each["status"] == "DEPLOY_FAILED"]
            assert not failed, failed
            if all(each["status"] == "RUNNING" for each in applications):
                return {name: count for each in applications for name, count in each["replicas"].items()}
            assert time.monotonic() < deadline, f"applications do not run: {applications}"
            time.sleep(0.2)

    def wait_for(self, path: str, *, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None) -> None:
        """Wait until a request has status 200."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        problem = ""
        while time.monotonic() < deadline:
            try:
                response = self.client.request("POST" if body else "GET", path, headers=headers, json=body)
            except httpx.TransportError as error:
                problem = str(error)
            else:
                if response.status_code == 200:
                    return
                problem = response.text
            time.sleep(0.2)
        raise AssertionError(f"{path} does not answer: {problem}")

    def _ask(self, command: str, value: Any = None) -> Any:
        """The answer of the process with Ray Serve to one of `_COMMANDS`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, value]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process with Ray Serve has ended"
        return json.loads(answer)


def _run(nodes: Sequence[Mapping[str, float]]) -> None:
    """Run Ray Serve until the standard input ends. Each line is a command and its value."""
    import ray
    from ray import serve

    # Ray prints messages, such as errors of tasks: standard output is for the test alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="spotune-test-") as folder:
        ray.init(
            address="local",
            num_cpus=0 if nodes else None,
            num_gpus=0,
            resources={} if nodes else _RESOURCES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(Path(folder) / "ray"),
        )
        started = [_start_node(ray.get_runtime_context().gcs_address, resources) for resources in nodes]
        for line in sys.stdin:
            command, value = json.loads(line)
            print(json.dumps(_COMMANDS[command](started, value)), file=answers, flush=True)
        serve.shutdown()
        for node in started:
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        ray.shutdown()


def _start_node(address: str, resources: Mapping[str, float]) -> Any:
    """Start a Ray node on this machine. `ray start` would not: it takes 127.0.0.1 for the address of another laptop."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters: dict[str, Any] = {
        "gcs_address": address,
        "node_ip_address": "127.0.0.1",
        "num_cpus": 1,
        "num_gpus": 0,
        "resources": dict(resources),
        "object_store_memory": _OBJECT_STORE_BYTES,
        "node_manager_port": 0,
        "dashboard_agent_listen_port": None,
        "include_log_monitor": False,
    }
    return Node(RayParams(**parameters), head=False, shutdown_at_exit=True, spawn_reaper=False)


def _deploy(_nodes: list[Any], config: dict[str, Any]) -> None:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    controller: Any = _get_global_client()
    controller.deploy_apps(ServeDeploySchema.model_validate(config))


def _add_node(nodes: list[Any], resources: dict[str, float]) -> None:
    import ray

    nodes.append(_start_node(ray.get_runtime_context().gcs_address, resources))


def _drain_node(nodes: list[Any], value: tuple[int, float]) -> bool:
    """What the command `ray drain-node` does; returns whether the node accepts it."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2

    number, seconds = value
    worker: Any = global_worker
    messages: Any = autoscaler_pb2
    reason = messages.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    deadline = int((time.time() + seconds) * 1000)
    accepted: bool = worker.gcs_client.drain_node(nodes[number].node_id, reason, "spot notice", deadline)[0]
    return accepted


def _ongoing_requests(nodes: list[Any], deployment: str) -> dict[int, int]:
    """What Ray Serve's actors count themselves, by the number of their node."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.serve.context import _get_global_client

    numbers = {node.node_id: number for number, node in enumerate(nodes)}
    controller: Any = _get_global_client()
    replicas = [
        replica
        for application in controller.get_serve_details()["applications"].values()
        for name, each in application["deployments"].items()
        for replica in each["replicas"]
        if name == deployment and replica["state"] in {"RUNNING", "PENDING_MIGRATION"}
    ]
    actors = [ray.get_actor(replica["actor_name"], namespace=SERVE_NAMESPACE) for replica in replicas]
    counts: list[int] = ray.get([actor.get_num_ongoing_requests.remote() for actor in actors])
    return {numbers.get(replica["node_id"], -1): count for replica, count in zip(replicas, counts, strict=True)}


def _states(_nodes: list[Any], _value: None) -> list[dict[str, Any]]:
    """The applications: their status and message, and the number of running replicas of each deployment."""
    from ray import serve

    return [
        {
            "status": application.status,
            "message": "; ".join([application.message, *(each.message for each in application.deployments.values())]),
            "replicas": {
                name: sum(count for state, count in each.replica_states.items() if state == "RUNNING")
                for name, each in application.deployments.items()
            },
        }
        for application in serve.status().applications.values()
    ]


_COMMANDS: dict[str, Callable[[list[Any], Any], Any]] = {
    "deploy": _deploy,
    "states": _states,
    "add_node": _add_node,
    "drain_node": _drain_node,
    "ongoing_requests": _ongoing_requests,
}
"""What a test can ask of the process: functions of the nodes that were started, and of a value."""

if __name__ == "__main__":
    _run(json.loads(sys.argv[1]))
