"""A private Ray with Ray Serve in a process of its own. A test deploys configurations in it, as `serve deploy` does."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_PATIENCE_SECONDS = 180.0
_RESOURCES = {"spotune_gateway": 1.0, "spotune_replica": 2.0}
_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "180000",
}


class RayServe:
    """Ray Serve on this machine, with an HTTP client of its proxy.

    Attributes:
        client: asks the proxy.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(port)],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE_SECONDS)

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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"applications": applications}) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "deployed\n"

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


def _run(port: int) -> None:
    """Run Ray Serve, and deploy each line of the standard input, until it ends."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="spotune-test-") as folder:
        ray.init(
            address="local",
            num_gpus=0,
            resources=_RESOURCES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=80 * 1024 * 1024,
            _temp_dir=str(Path(folder) / "ray"),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
        controller: Any = _get_global_client()
        for line in sys.stdin:
            controller.deploy_apps(ServeDeploySchema.model_validate_json(line))
            print("deployed", flush=True)  # noqa: T201 - the answer to the test
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    _run(int(sys.argv[1]))
