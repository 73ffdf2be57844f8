"""The Ray Serve application: a gateway deployment in front of replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig

from spotune_serve.deployment.config import Scaling, ServiceConfig
from spotune_serve.deployment.hub import model_folder
from spotune_serve.deployment.ray_backend import RayBackend
from spotune_serve.deployment.replica import Replica
from spotune_serve.gateway.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import read_api_keys

if TYPE_CHECKING:
    from fastapi import FastAPI

REPLICA = "Replica"
GATEWAY = "Gateway"
_HEALTH_PERIOD_SECONDS = 2.0
_MAX_STREAMS = 10_000
"""The gateway's own limits refuse requests with a clear error before Ray Serve would queue them."""
_LOAD_WINDOW_SECONDS = 20.0
"""The load is averaged over this time. Ray Serve measures it every 10 s."""
_UPSCALE_DELAY_SECONDS = 10.0
"""Short, because a new node takes minutes anyway. From zero replicas, Ray Serve starts the first without delay."""
_DOWNSCALE_DELAY_SECONDS = 300.0
_SCALE_TO_ZERO_DELAY_SECONDS = 600.0
"""Long, because the next request waits for a node and for the model."""


class Gateway:
    """The ASGI application of the gateway, with the replicas as its backend.

    Raises:
        JobError: the model or the API keys cannot be read.
    """

    def __init__(self, config: ServiceConfig, replicas: Any) -> None:
        self._config = config
        self._backend = RayBackend(replicas, scales_to_zero=config.scaling.scales_to_zero)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, built inside the replica of this deployment: it cannot be pickled."""
        config, settings = self._config, self._config.gateway
        if config.api_keys_file is not None:
            settings = replace(settings, api_keys=read_api_keys(config.api_keys_file))
        folder = model_folder(config.directory, weights=False)
        return create_app(ServedModel.load(folder, config.name, config.adapters), self._backend, settings)


def build_application(config: ServiceConfig) -> serve.Application:
    """Gateway and replicas as an application for `serve.run`, or for a RayService."""
    placement = config.placement
    limit: Any = placement.max_per_node
    replica: Any = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=_MAX_STREAMS,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": 0, "num_gpus": config.gpus, "resources": dict(placement.replica_resources)},
        max_replicas_per_node=limit,
        **_number_of_replicas(config.scaling),
    )(Replica)
    gateway: Any = serve.deployment(
        name=GATEWAY,
        num_replicas=placement.gateways,
        max_ongoing_requests=_MAX_STREAMS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": 0, "resources": dict(placement.gateway_resources)},
        max_replicas_per_node=limit,
    )(serve.ingress()(Gateway))
    application: serve.Application = gateway.bind(config, replica.bind(config))
    return application


def _number_of_replicas(scaling: Scaling) -> dict[str, Any]:
    """The options of a deployment for its number of replicas."""
    if not scaling.autoscales:
        return {"num_replicas": scaling.max_replicas}
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        # The first replica of a service that scales to zero shows whether the model can be loaded.
        initial_replicas=max(1, scaling.min_replicas),
        max_replicas=scaling.max_replicas,
        target_ongoing_requests=scaling.target_ongoing_requests,
        look_back_period_s=_LOAD_WINDOW_SECONDS,
        upscale_delay_s=_UPSCALE_DELAY_SECONDS,
        downscale_delay_s=_DOWNSCALE_DELAY_SECONDS,
        downscale_to_zero_delay_s=_SCALE_TO_ZERO_DELAY_SECONDS,
    )
    return {"autoscaling_config": autoscaling}
