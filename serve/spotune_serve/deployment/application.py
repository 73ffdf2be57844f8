"""The Ray Serve application: a gateway deployment in front of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import serve

from spotune_serve.deployment.config import ServiceConfig
from spotune_serve.deployment.ray_backend import RayBackend
from spotune_serve.deployment.replica import Replica
from spotune_serve.gateway.app import create_app
from spotune_serve.gateway.served_model import ServedModel

if TYPE_CHECKING:
    from fastapi import FastAPI

REPLICA = "Replica"
GATEWAY = "Gateway"
_HEALTH_PERIOD_SECONDS = 2.0
_MAX_STREAMS = 10_000
"""The gateway's own limits refuse requests with a clear error before Ray Serve would queue them."""


class Gateway:
    """The ASGI application of the gateway, with the replicas as its backend."""

    def __init__(self, config: ServiceConfig, replicas: Any) -> None:
        self._config = config
        self._backend = RayBackend(replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, built inside the replica of this deployment: it cannot be pickled."""
        model = ServedModel.load(self._config.directory, self._config.name, self._config.adapters)
        return create_app(model, self._backend, self._config.gateway)


def build_application(config: ServiceConfig) -> serve.Application:
    """Gateway and replicas as an application for `serve.run`, or for a RayService."""
    replica: Any = serve.deployment(
        name=REPLICA,
        num_replicas=config.replicas,
        max_ongoing_requests=_MAX_STREAMS,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": 0, "num_gpus": config.gpus},
    )(Replica)
    gateway: Any = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=_MAX_STREAMS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Gateway))
    application: serve.Application = gateway.bind(config, replica.bind(config))
    return application
