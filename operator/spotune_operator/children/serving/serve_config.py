"""The configuration of Ray Serve: ``serveConfigV2`` of the RayService, with the arguments of ``spotune_serve``.

The gateway is one application, and every version of the model is another: versions come and go while the gateway keeps
the clients' connections. Ray Serve restarts all processes of an application at once when an argument changes, and
applies the options of deployments in place. So the numbers of gateways and replicas, and the versions with their
weights, are options. Arguments never change in a running cluster: those of the gateway are part of the pod templates,
and a version with other arguments is another application.
"""

import json
import math
from typing import Any, Final

import yaml

from spotune.service import ReplicasSpec
from spotune_operator.children.pod_template.ray_pods import DRAIN_MARGIN_SECONDS, grace_seconds
from spotune_operator.children.ports import SERVE
from spotune_operator.children.serving.pinned import matching_pin
from spotune_operator.children.serving.resolved_service import DeployedVersion, ResolvedService
from spotune_operator.kube.digest import digest

API_KEYS_FOLDER: Final = "/etc/spotune/api-keys"
API_KEYS_FILE: Final = "keys"
APPLICATION: Final = "spotune"
"""Name of the gateway's application."""
_GATEWAY_IMPORT: Final = "spotune_serve.deployment.cluster:build_gateway"
_MODEL_IMPORT: Final = "spotune_serve.deployment.cluster:build_model"
_GATEWAY: Final = "Gateway"
_REPLICA: Final = "Replica"
"""Names of the deployments in ``spotune_serve``."""
_ENGINE_ARGUMENTS: Final = ("engine", "batchInvariant")
"""Arguments of a model that its pods do not show otherwise. They are left out if they have their defaults."""
_NOTICE_DELAY_SECONDS: Final = 2
"""Seconds until Ray Serve's controller has noticed that a node is draining."""
_KEEP_ALIVE_SECONDS: Final = 90
"""Longer than the 60 s of ingress controllers: the side that reuses connections must be the first to close them."""
_AUTOSCALING: Final = {"look_back_period_s": 20, "upscale_delay_s": 10}
"""Delays in seconds. Upscaling is quick, because a new node takes minutes anyway."""
_LAST_REPLICA: Final = 2
"""So many times longer is the delay for the last replica, because the next request waits for a node and the model."""


def serve_config(resolved: ResolvedService) -> str:
    """The configuration as YAML."""
    applications = [_gateway(resolved), *(_model(resolved, version) for version in resolved.versions)]
    content: dict[str, Any] = {"proxy_location": "Disabled", "applications": applications}
    if "port" not in serve_arguments(resolved)["gateway"]:
        # Pods of an earlier version: its gateway has no port of its own.
        http = {"host": "0.0.0.0", "port": SERVE.number, "keep_alive_timeout_s": _KEEP_ALIVE_SECONDS}  # noqa: S104 - the NetworkPolicy restricts access
        content |= {"proxy_location": "EveryNode", "http_options": http}
    return yaml.safe_dump(content, sort_keys=False)


def _gateway(resolved: ResolvedService) -> dict[str, Any]:
    """The application of the gateway."""
    versions = [_listed(version) for version in resolved.versions if version.weight is not None]
    deployment = {
        "name": _GATEWAY,
        "num_replicas": resolved.service.spec.gateway.replicas,
        "user_config": {"versions": versions},
    }
    return {
        "name": APPLICATION,
        "import_path": _GATEWAY_IMPORT,
        "route_prefix": "/",
        "args": serve_arguments(resolved)["gateway"],
        "deployments": [deployment],
    }


def _listed(version: DeployedVersion) -> dict[str, Any]:
    """A version as the gateway knows it."""
    return {
        "application": version.application,
        **_location(version),
        "version": version.name,
        "weight": version.weight,
        **_step(version),
    }


def _location(version: DeployedVersion) -> dict[str, Any]:
    """The arguments that say where a version and its adapters are."""
    return {
        "directory": version.model.directory,
        "revision": version.model.revision,
        "adapters": {name: location.directory for name, location in version.adapters.items()},
    }


def _step(version: DeployedVersion) -> dict[str, int]:
    """The argument for the step of a FinetuneJob's export."""
    return {"step": version.model.step} if version.model.step is not None else {}


def _engine(resolved: ResolvedService) -> dict[str, Any]:
    """The arguments that choose the engine."""
    spec = resolved.service.spec
    given = {"engine": spec.engine if spec.engine != "auto" else "", "batchInvariant": spec.batch_invariant}
    return {name: given[name] for name in _ENGINE_ARGUMENTS if given[name]}


def _model(resolved: ResolvedService, version: DeployedVersion) -> dict[str, Any]:
    """The application of a version: replicas without a route."""
    arguments = {
        "directory": version.model.directory,
        **_step(version),
        **{name: value for name, value in _location(version).items() if value},
        **serve_arguments(resolved)["model"],
    }
    return {
        "name": version.application,
        "import_path": _MODEL_IMPORT,
        "route_prefix": None,
        "args": arguments,
        "deployments": [{"name": _REPLICA, **_number_of_replicas(version.replicas)}],
    }


def serve_arguments(resolved: ResolvedService) -> dict[str, dict[str, Any]]:
    """The arguments of the applications, without absent optional ones: as pinned, if there is a pin.

    ``gateway`` are those of the gateway, ``model`` those that all versions have in common.
    """
    pinned = matching_pin(resolved)
    if pinned is not None:
        arguments: dict[str, dict[str, Any]] = json.loads(pinned.arguments)
        return arguments
    spec = resolved.service.spec
    keys = {"apiKeysFile": f"{API_KEYS_FOLDER}/{API_KEYS_FILE}"} if spec.api_keys_secret_ref is not None else {}
    gateway = {
        "name": resolved.service.model_id,
        **keys,
        "port": SERVE.number,
        "requestTimeoutSeconds": resolved.request_timeout_seconds,
        "drainSeconds": drain_seconds(resolved),
        # With it, the first request waits for a replica.
        "scalesToZero": spec.replicas.min == 0,
    }
    model = {"gpus": spec.gpus, **_engine(resolved), "drainSeconds": drain_seconds(resolved)}
    return {"gateway": gateway, "model": model}


def arguments_digest(resolved: ResolvedService) -> str:
    """Changes with the arguments of the gateway and the choice of the engine.

    Ray Serve would restart the processes of the running cluster.
    """
    arguments = serve_arguments(resolved)
    engine = {name: value for name, value in arguments["model"].items() if name in _ENGINE_ARGUMENTS}
    return digest(arguments["gateway"] | engine)


def drain_seconds(resolved: ResolvedService) -> int:
    """Seconds that a replica or gateway has to finish its requests: they fit into every notice of its nodes."""
    shortest = min(grace_seconds(resolved.provider, capacity) for capacity in resolved.capacities)
    return shortest - DRAIN_MARGIN_SECONDS - _NOTICE_DELAY_SECONDS


def _number_of_replicas(replicas: ReplicasSpec) -> dict[str, Any]:
    """The options of the deployment for its number of replicas."""
    if not replicas.autoscales:
        return {"num_replicas": replicas.max}
    config = {
        "min_replicas": replicas.min,
        # The first replica of a service that scales to zero shows whether the model can be loaded.
        "initial_replicas": max(replicas.min, 1),
        "max_replicas": replicas.max,
        "target_ongoing_requests": replicas.target_ongoing_requests,
    }
    delay = math.ceil(replicas.scale_down_delay.seconds)
    delays = {"downscale_delay_s": delay, "downscale_to_zero_delay_s": _LAST_REPLICA * delay}
    return {"num_replicas": "auto", "autoscaling_config": config | _AUTOSCALING | delays}
