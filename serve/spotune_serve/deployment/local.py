"""A service on this machine: a private Ray, which ends with this process, and the gateway on one port."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

from spotune.errors import InfrastructureError, JobError, UsageError

if TYPE_CHECKING:
    from spotune_serve.deployment.config import GatewayConfig, ModelConfig

_GATEWAY = "spotune"
_MODEL = "model"
"""Names of the applications. The model's name is that of its only version."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's minimum is 75 MiB; requests and tokens are small."""
_START_ATTEMPTS = 3
_READY_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.1
_JOB_ERROR = re.compile(r"JobError: (.+)")


@contextmanager
def local_service(gateway: GatewayConfig, model: ModelConfig, host: str, port: int) -> Iterator[str]:
    """Serve a model on this machine; yields the URL once requests are answered, and drains at exit.

    Args:
        gateway: its gateway, of one or several processes.
        model: its only version.
        host: address to listen on.
        port: TCP port; 0 takes a free one.

    Raises:
        UsageError: the port is in use.
        JobError: the model cannot be loaded.
        InfrastructureError: Ray does not start, or the service does not become ready.
    """
    with reserved_port(host, port, is_shared=gateway.processes > 1) as port:
        folder = Path(tempfile.mkdtemp(prefix="spotune-serve-", dir="/tmp"))
        try:
            if gateway.processes > 1:
                gateway = replace(gateway, counts_folder=folder / uuid.uuid4().hex)
            _start_ray(folder, gpus=model.gpus > 0)
            try:
                yield _deploy(gateway, model, host, port)
            finally:
                _shut_down()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reserved_port(host: str, port: int, *, is_shared: bool) -> Iterator[int]:
    """A port that no other program uses, as its number; reserved as long as the service runs.

    It is bound without listening. On Linux such a socket gets no connections, and the kernel gives its port to no other
    program that asks for a free one. Processes that share a port would share it with any other process of this user,
    silently. So the reservation of a shared port has no SO_REUSEADDR: it keeps out all that do not set SO_REUSEPORT,
    such as the check of another service.
    """
    try:
        reservation = socket.create_server((host, port or free_port(host)))
    except OSError as error:
        raise UsageError(
            f"port {port} on {host} cannot be used: {error.strerror}. Choose another one with --port, or a free one "
            "with --port 0."
        ) from error
    with reservation:
        number = int(reservation.getsockname()[1])
        if is_shared:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reservation.shutdown(socket.SHUT_RDWR)  # it stops listening and stays bound
        yield number


def free_port(host: str) -> int:
    """A free port, as its number. The kernel takes back a port that it chose itself when a socket is shut down."""
    with socket.create_server((host, 0)) as chosen:
        return int(chosen.getsockname()[1])


def _start_ray(folder: Path, *, gpus: bool) -> None:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON"):
        os.environ.pop(name, None)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Ray's switch for laptops: every node is 127.0.0.1, and no port is open to the network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of 30 s is too short for a busy machine.
        "RAY_agent_register_timeout_ms": "180000",
    }
    for attempts_left in reversed(range(_START_ATTEMPTS)):
        try:
            _init_ray(folder / "ray", gpus=gpus)
            return
        except Exception as error:  # Ray raises Exception itself when a node is not ready after 30 s
            if attempts_left == 0:
                raise InfrastructureError(f"Ray cannot be started on this machine: {error}") from error


def _init_ray(folder: Path, *, gpus: bool) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_gpus=None if gpus else 0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
    except BaseException:
        ray.shutdown()
        raise


def _deploy(gateway: GatewayConfig, model: ModelConfig, host: str, port: int) -> str:
    from ray import serve

    from spotune_serve.deployment.application import gateway_application, model_application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    version = {
        "application": _MODEL,
        "directory": str(model.directory),
        "adapters": {name: str(folder) for name, folder in model.adapters.items()},
        "version": gateway.name,
        "weight": 1,
    }
    targets = [
        serve.RunTarget(model_application(model), _MODEL, route_prefix=None),
        serve.RunTarget(gateway_application(replace(gateway, host=host, port=port), {"versions": [version]}), _GATEWAY),
    ]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        raise _start_error(error) from error
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - compared, not bound
    _wait_until_ready(url)
    return url


def _start_error(error: RuntimeError) -> JobError | InfrastructureError:
    """Why an application did not start: the reason that its processes gave, if they gave one."""
    from ray import serve

    applications = serve.status().applications.values()
    messages = [each.message for application in applications for each in application.deployments.values()]
    if reasons := _JOB_ERROR.findall("\n".join(messages)):
        return JobError(reasons[-1])
    reason = "\n".join(message.strip() for message in messages if message) or str(error)
    return InfrastructureError(f"the service cannot be started: {reason}")


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
    problem = "no response"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5) as response:
                if response.status == 200:
                    return
        except (URLError, OSError) as error:
            problem = str(error)
        time.sleep(_POLL_SECONDS)
    raise InfrastructureError(f"the service did not become ready within {_READY_TIMEOUT_SECONDS:.0f} s: {problem}")


def _shut_down() -> None:
    """Let running requests finish, up to the drain time, and end Ray. The replicas stay until the gateway has ended."""
    import ray
    from ray import serve

    if ray.is_initialized():
        for application in (_GATEWAY, _MODEL):
            serve.delete(application)
        ray.shutdown()
