"""CPUs, memory and GPUs of the containers, with amounts for jobs that say nothing."""

import math
from collections.abc import Mapping
from typing import Any, Final

from spotune.job.cluster import ResourcesSpec
from spotune.units.quantities import Quantity
from spotune_operator.children.strategic_merge import merge
from spotune_operator.errors import ResourcesError
from spotune_operator.providers import GPU_RESOURCE

Amounts = dict[str, dict[str, str]]
"""``requests`` and ``limits`` by resource name."""

HEAD: Final[Mapping[str, str]] = {"cpu": "1", "memory": "4Gi"}
"""Ray's control plane and the driver; the data is prepared here too."""
SUPERVISOR: Final[Amounts] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
CPU_WORKER: Final[Mapping[str, str]] = {"cpu": "2", "memory": "4Gi"}
_CPUS_PER_GPU = 2
_GIB_PER_GPU = 8
"""What is left on the smallest GPU nodes of the clouds (4 CPUs, 16 GiB) after the system's own pods."""
_MEBIBYTE = 2**20


def worker_defaults(gpus: int) -> dict[str, str]:
    """Requests of a worker pod with so many GPUs; without limits, for a GPU node is seldom shared."""
    return {"cpu": str(_CPUS_PER_GPU * gpus), "memory": f"{_GIB_PER_GPU * gpus}Gi"} if gpus else dict(CPU_WORKER)


def ray_resources(
    given: ResourcesSpec, template: Mapping[str, Any], defaults: Mapping[str, str], gpus: int, group: str
) -> Amounts:
    """``v1.ResourceRequirements`` of a Ray container.

    Args:
        given: The job's own field.
        template: ``resources`` of the same container in the pod template, which the field overrides.
        defaults: Requests for what neither of them names.
        gpus: GPUs of the container.
        group: camelCase path of the section that both belong to, for messages.

    Raises:
        ResourcesError: More is requested than the limit allows, or GPUs are asked for elsewhere than in ``gpus``.
    """
    own = {"requests": _texts(given.requests), "limits": _texts(given.limits)}
    asked = merge(template, own, f"{group}.podTemplate")
    requests, limits = _texts(asked["requests"]), _texts(asked["limits"])
    for kind, amounts in (("requests", requests), ("limits", limits)):
        for name, amount in amounts.items():
            if math.isinf(_amount(amount, group)):
                raise ResourcesError(f"{group}.resources.{kind}.{name}", "is more than any node has")
    if GPU_RESOURCE in requests or GPU_RESOURCE in limits:
        reason = f"names {GPU_RESOURCE}: give GPUs per pod as workers.gpus; the head has none"
        raise ResourcesError(f"{group}.resources", reason)
    for name in requests.keys() & limits.keys():
        if _amount(requests[name], group) > _amount(limits[name], group):
            reason = f"{requests[name]} is more than limits.{name}, {limits[name]}"
            raise ResourcesError(f"{group}.resources.requests.{name}", reason)
    left = {name: amount for name, amount in defaults.items() if name not in requests and name not in limits}
    if gpus:
        limits = limits | {GPU_RESOURCE: str(gpus)}
    return {"requests": left | requests} | ({"limits": limits} if limits else {})


def shared_memory(amounts: Amounts) -> str:
    """Size of /dev/shm: half of the container's memory, which it counts against."""
    memory = amounts.get("limits", {}).get("memory") or amounts["requests"]["memory"]
    return f"{max(1, int(Quantity(memory).value / 2 / _MEBIBYTE))}Mi"


def whole_cpus(amounts: Amounts) -> int:
    """CPUs of a container as Ray counts them, at least one."""
    cpus = amounts.get("limits", {}).get("cpu") or amounts["requests"]["cpu"]
    return max(1, int(Quantity(cpus).value))


def _texts(amounts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


def _amount(text: str, group: str) -> float:
    try:
        return Quantity(text).value
    except ValueError as error:
        raise ResourcesError(f"{group}.podTemplate", str(error)) from error
