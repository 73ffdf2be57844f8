"""The pin of a service: its Ray cluster and the arguments of Ray Serve, as they were rendered, kept in its status.

Another version of the operator has other pod templates and arguments. They would start a second cluster of every
service at once, or restart its processes. So they are rendered again only when a field changes that they depend on.
"""

from __future__ import annotations

import json
from typing import Any, Final

from spotune.service import PinnedServiceStatus
from spotune_operator.children.serving.groups import group_sizes
from spotune_operator.children.serving.resolved_service import ResolvedService
from spotune_operator.kube.digest import digest

_FIELDS_WITHOUT_PODS: Final = frozenset(
    {"adapters", "httpRoute", "ingress", "model", "onDemandBase", "rollout", "suspend"}
)
"""Fields of the spec that no pod template or argument depends on, except through the claims and the model id."""


def matching_pin(resolved: ResolvedService) -> PinnedServiceStatus | None:
    """The pin of a service; None if it has none, or if a field has changed that the pin depends on.

    A pin of another version of the operator may have other groups, whose numbers of pods nobody knows now. It is None
    then, too.
    """
    pinned = resolved.pinned
    if pinned is None or pinned.inputs != inputs_digest(resolved):
        return None
    groups = {group["groupName"] for group in json.loads(pinned.ray_cluster)["workerGroupSpecs"]}
    return pinned if groups == {size.name for size in group_sizes(resolved)} else None


def inputs_digest(resolved: ResolvedService) -> str:
    """Hash of all that the pods and the arguments are rendered from, without the numbers of pods."""
    service = resolved.service
    spec: dict[str, Any] = service.model_dump(mode="json", exclude_defaults=True)["spec"]
    kept = {name: value for name, value in spec.items() if name not in _FIELDS_WITHOUT_PODS}
    gateway = {name: value for name, value in spec.get("gateway", {}).items() if name != "replicas"}
    inputs = {
        "spec": kept | {"gateway": gateway, "replicas": {}},
        "autoscales": service.spec.replicas.autoscales,
        "scalesToZero": service.spec.replicas.min == 0,
        "tokenSecretRef": spec["model"].get("tokenSecretRef"),
        "modelId": service.model_id,
        "claims": list(resolved.claims),
        "provider": resolved.provider.name.value,
        "image": resolved.image,
        "rayVersion": resolved.ray_version,
    }
    return digest(inputs)
