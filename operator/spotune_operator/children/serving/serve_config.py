"""The configuration of Ray Serve: ``serveConfigV2`` of the RayService, with the arguments of ``spotune_serve``.

Ray Serve restarts all processes of an application at once when an argument changes, and applies the options of
deployments in place. So the numbers of gateways and replicas are options, and no arguments.
"""

import math
from typing import Any, Final

import yaml

from spotune.service import ReplicasSpec
from spotune_operator.children.pod_template.ray_pods import DRAIN_MARGIN_SECONDS, grace_seconds
from spotune_operator.children.ports import SERVE
from spotune_operator.children.serving.resolved_service import ResolvedService
from spotune_operator.kube.digest import digest

API_KEYS_FOLDER: Final = "/etc/spotune/api-keys"
API_KEYS_FILE: Final = "keys"
APPLICATION: Final = "spotune"
_IMPORT_PATH: Final = "spotune_serve.deployment.cluster:build"
_GATEWAY: Final = "Gateway"
_REPLICA: Final = "Replica"
"""Names of the deployments in ``spotune_serve``."""
_NOTICE_DELAY_SECONDS: Final = 2
"""Seconds until Ray Serve's controller has noticed that a node is draining."""
_KEEP_ALIVE_SECONDS: Final = 90
"""Longer than the 60 s of ingress controllers: the side that reuses connections must be the first to close them."""
_AUTOSCALING: Final = {"look_back_period_s": 20, "upscale_delay_s": 10}
"""Of ``spotune_serve``, in seconds: an option replaces all of its own values."""
_LAST_REPLICA: Final = 2
"""So many times longer is the delay for the last replica, because the next request waits for a node and the model."""


def serve_config(resolved: ResolvedService) -> str:
    """The configuration as YAML."""
    application = {
        "name": APPLICATION,
        "import_path": _IMPORT_PATH,
        "route_prefix": "/",
        "args": arguments(resolved),
        "deployments": [
            {"name": _GATEWAY, "num_replicas": resolved.service.spec.gateway.replicas},
            {"name": _REPLICA, **_number_of_replicas(resolved.service.spec.replicas)},
        ],
    }
    http = {"host": "0.0.0.0", "port": SERVE.number, "keep_alive_timeout_s": _KEEP_ALIVE_SECONDS}  # noqa: S104 - the NetworkPolicy restricts access
    content = {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}
    return yaml.safe_dump(content, sort_keys=False)


def arguments(resolved: ResolvedService) -> dict[str, Any]:
    """The arguments of the application (``ServingArguments`` of ``spotune_serve``), without absent optional ones."""
    spec = resolved.service.spec
    optional = {
        "adapters": {name: location.directory for name, location in resolved.adapters.items()},
        "revision": spec.model.revision if resolved.model.source else "",
        # Only for the gateway: it lets the first request wait for a replica. The options have the numbers.
        "replicas": {"min": 0, "max": 1} if spec.replicas.min == 0 else {},
        "apiKeysFile": f"{API_KEYS_FOLDER}/{API_KEYS_FILE}" if spec.api_keys_secret_ref is not None else "",
    }
    return {
        "directory": resolved.model.directory,
        "name": resolved.service.model_id,
        **{name: value for name, value in optional.items() if value},
        "gpus": spec.gpus,
        "requestTimeoutSeconds": resolved.request_timeout_seconds,
        "drainSeconds": drain_seconds(resolved),
    }


def arguments_digest(resolved: ResolvedService) -> str:
    """Changes with the arguments, and with the version of a model whose location stays the same."""
    return digest([arguments(resolved), resolved.versions])


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
