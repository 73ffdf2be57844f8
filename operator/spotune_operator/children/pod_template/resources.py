"""CPUs, memory and GPUs of the containers, with defaults."""

import math
from collections.abc import Mapping
from typing import Any, Final

from spotune.custom_resource.pods import ResourcesSpec
from spotune.units.quantities import Quantity
from spotune_operator.children.pod_template.strategic_merge import merge
from spotune_operator.errors import ResourcesError
from spotune_operator.providers import GPU_RESOURCE

Amounts = dict[str, dict[str, str]]
"""``requests`` and ``limits`` by resource name."""

HEAD: Final[Mapping[str, str]] = {"cpu": "1", "memory": "4Gi"}
"""Requests of the head container: Ray's control plane, the driver, and the preparation of data."""
SUPERVISOR: Final[Amounts] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
GATEWAY_POD: Final[Mapping[str, str]] = {"cpu": "1", "memory": "2Gi"}
"""Requests of a gateway container: Ray, the HTTP server, and the tokenizer."""
AUTOSCALER: Final[Amounts] = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
CPU_WORKER: Final[Mapping[str, str]] = {"cpu": "2", "memory": "4Gi"}
_CPUS_PER_GPU = 2
_GIB_PER_GPU = 8
"""Fits on the smallest GPU nodes of the clouds (4 CPUs, 16 GiB) beside the system pods."""
_MEBIBYTE = 2**20


def worker_defaults(gpus: int) -> dict[str, str]:
    """Default requests of a worker pod by its number of GPUs; no limits, because GPU nodes are rarely shared."""
    return {"cpu": str(_CPUS_PER_GPU * gpus), "memory": f"{_GIB_PER_GPU * gpus}Gi"} if gpus else dict(CPU_WORKER)


def ray_resources(
    given: ResourcesSpec,
    template: Mapping[str, Any],
    defaults: Mapping[str, str],
    gpus: int,
    group: str,
    gpus_advice: str,
) -> Amounts:
    """``v1.ResourceRequirements`` of a Ray container.

    Args:
        given: The field ``resources``.
        template: ``resources`` of the container in the user's pod template; ``given`` overrides them.
        defaults: Requests for resources that neither of them names.
        gpus: Number of GPUs of the container.
        group: camelCase path of their section, for messages.
        gpus_advice: Which field to use for GPUs, for the message about ``nvidia.com/gpu`` in ``resources``.

    Raises:
        ResourcesError: A request exceeds its limit, or GPUs are among the resources.
    """
    own = {"requests": _texts(given.requests), "limits": _texts(given.limits)}
    asked = merge(template, own, f"{group}.podTemplate")
    requests, limits = _texts(asked["requests"]), _texts(asked["limits"])
    for kind, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            if math.isinf(_amount(amount, group)):
                raise ResourcesError(f"{group}.resources.{kind}.{name}", "is larger than any node: lower it")
    if GPU_RESOURCE in requests or GPU_RESOURCE in limits:
        raise ResourcesError(f"{group}.resources", f"must not contain {GPU_RESOURCE}: {gpus_advice}")
    for name in requests.keys() & limits.keys():
        if _amount(requests[name], group) > _amount(limits[name], group):
            reason = f"{requests[name]} is larger than limits.{name}, {limits[name]}"
            raise ResourcesError(f"{group}.resources.requests.{name}", reason)
    left = {name: amount for name, amount in defaults.items() if name not in requests and name not in limits}
    if gpus:
        limits = limits | {GPU_RESOURCE: str(gpus)}
    return {"requests": left | requests} | ({"limits": limits} if limits else {})


def shared_memory(amounts: Amounts) -> str:
    """Size of /dev/shm: half of the container's memory, of which it is a part."""
    memory = amounts.get("limits", {}).get("memory") or amounts["requests"]["memory"]
    return f"{max(1, int(Quantity(memory).value / 2 / _MEBIBYTE))}Mi"


def whole_cpus(amounts: Amounts) -> int:
    """Number of CPUs of a container for Ray: whole CPUs, at least one."""
    cpus = amounts.get("limits", {}).get("cpu") or amounts["requests"]["cpu"]
    return max(1, int(Quantity(cpus).value))


def _texts(amounts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


def _amount(text: str, group: str) -> float:
    try:
        return Quantity(text).value
    except ValueError as error:
        raise ResourcesError(f"{group}.podTemplate", str(error)) from error
