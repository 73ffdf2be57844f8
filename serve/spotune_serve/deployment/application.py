"""The Ray Serve applications: a gateway, and the replicas of one version of the model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve

from spotune.errors import JobError, SpotuneError
from spotune_serve.deployment.application_backend import REPLICA, ApplicationBackend
from spotune_serve.deployment.arguments import version_configs
from spotune_serve.deployment.config import GatewayConfig, ModelConfig, Placement, VersionConfig
from spotune_serve.deployment.exports import load_version
from spotune_serve.deployment.http_server import HttpServer
from spotune_serve.deployment.replica import Replica
from spotune_serve.deployment.replica_states import ReplicaStates
from spotune_serve.deployment.token_transport.receiver import TokenReceiver
from spotune_serve.deployment.token_transport.router import LeastRequestRouter
from spotune_serve.gateway.api_keys import ApiKeyFile
from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.version import VersionSource
from spotune_serve.gateway.versions import Versions

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

GATEWAY: Final = "Gateway"
_HEALTH_PERIOD_SECONDS = 2.0
_MAX_STREAMS = 10_000
"""The gateway's own limits refuse requests with a clear error before Ray Serve would queue them."""
_NEW_OBJECTS: Final = 20_000
"""Number of new objects after which the gateway collects garbage. Python's 700 are those of two requests: with hundreds
of them at once, it would search the objects of all running ones again and again."""
_GATEWAY_ENVIRONMENT: Final = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
"""The gateway has one event loop: nothing in it blocks, and each change of the thread delays a request. It calls its
replicas by gRPC, which takes less processor time than calls of actors."""


class Gateway:
    """The ASGI application of the gateway, with the replicas of other applications as its backends.

    Attributes:
        app: the application.

    Raises:
        JobError: the API keys cannot be read.
    """

    def __init__(self, config: GatewayConfig) -> None:
        keys = ApiKeyFile(config.api_keys_file) if config.api_keys_file is not None else None
        self._scales_to_zero = config.scales_to_zero
        self._versions = Versions(config.name, config.settings, counts_folder=config.counts_folder)
        self._receiver = TokenReceiver(ray.util.get_node_ip_address())
        self.app: FastAPI = create_app(self._versions, ReplicaStates(), keys)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve the versions of a user_config from now on. Running requests stay with their versions.

        Once the gateway serves a version, a wrong user_config changes nothing: an error here would make Ray Serve
        replace the process, and break its connections. `/stats` has the error.

        Args:
            user_config: see `GatewayUserConfig`.

        Raises:
            JobError: the first user_config is wrong, or none of its versions can be read.
        """
        versions = self._versions
        is_first = not versions.listed
        try:
            await versions.replace([self._source(config) for config in version_configs(user_config)])
        except SpotuneError as error:
            if is_first:
                raise
            logger.error("the versions stay as they are: %s", error)
            versions.error = str(error)
        if not versions.listed:
            raise JobError("; ".join(error for _weight, error in versions.unreadable.values()) or "there is no version")

    def _source(self, config: VersionConfig) -> VersionSource:
        def load() -> ServedModel:
            return load_version(
                config.directory,
                config.step,
                lambda folder: ServedModel.load(folder, self._versions.name, config.adapters),
                weights=False,
            )

        identity = (config.application, config.directory, config.step, tuple(config.adapters.items()))
        backend = ApplicationBackend(
            config.application, config.version, self._receiver, scales_to_zero=self._scales_to_zero
        )
        return VersionSource(config.version, config.weight, identity, load, backend)


class ListeningGateway(Gateway):
    """A gateway with a port of its own: Ray Serve's proxies would delay each token.

    Ray Serve 2.60 calls `__init__` and `reconfigure`. Later it calls `reconfigure` alone, in the running process,
    whenever the `user_config` changes. Before it ends the process it waits for `__del__`, up to `drain_seconds`.
    """

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        gc.set_threshold(_NEW_OBJECTS)
        self._server = HttpServer(
            config.host,
            config.port,
            keep_alive_seconds=config.keep_alive_seconds,
            linger_seconds=config.linger_seconds,
            shares_port=config.processes > 1,
        )

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """As `Gateway.reconfigure`. After the first time, it takes connections."""
        await super().reconfigure(user_config)
        await self._server.start(self.app)

    async def __del__(self) -> None:
        """Let running requests finish."""
        await self._server.drain()


def gateway_application(config: GatewayConfig, user_config: Mapping[str, Any] | None = None) -> serve.Application:
    """The application of the gateway, for `serve.run` or a RayService.

    Args:
        config: the gateway.
        user_config: the versions, see `GatewayUserConfig`; None: the option `user_config` of a RayService has them.
    """
    gateway: Any = serve.deployment(
        name=GATEWAY,
        num_replicas=config.processes,
        user_config=user_config,
        **_process_options(config.placement, config.drain_seconds, {"runtime_env": {"env_vars": _GATEWAY_ENVIRONMENT}}),
    )(ListeningGateway)
    application: serve.Application = gateway.bind(config)
    return application


def model_application(config: ModelConfig) -> serve.Application:
    """The application of one version of a model: its replicas, without a route."""
    replica: Any = serve.deployment(
        name=REPLICA,
        num_replicas=config.replicas,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        request_router_config={"request_router_class": LeastRequestRouter},
        **_process_options(config.placement, config.drain_seconds, {"num_gpus": config.gpus}),
    )(Replica)
    application: serve.Application = replica.bind(config)
    return application


def _process_options(placement: Placement, drain_seconds: float, actor_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a deployment that gateways and replicas share."""
    return {
        "max_ongoing_requests": _MAX_STREAMS,
        "graceful_shutdown_timeout_s": drain_seconds,
        "ray_actor_options": {"num_cpus": 0, "resources": dict(placement.resources), **actor_options},
        "max_replicas_per_node": placement.max_per_node,
    }
