"""The pin of a job: the image and the RayCluster that were rendered at its start, kept in its status.

Another version of the operator has other defaults and other pod templates. A running job keeps its own: they are
rendered again only when a field of the spec changes that the pods depend on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Self

from spotune.job import FinetuneJob, PinnedStatus
from spotune_operator.children.raycluster import Replicas, ray_cluster, ray_cluster_without_spec
from spotune_operator.children.resolved_job import RAY_VERSION, ResolvedJob, default_image, resolve
from spotune_operator.kube.digest import digest
from spotune_operator.observe.state import TEMPLATE_ANNOTATION
from spotune_operator.providers import PROVIDERS, Provider, ProviderName, detect
from spotune_operator.settings import Settings

_FIELDS_WITHOUT_PODS: Final[Mapping[str, frozenset[str]]] = {
    "training": frozenset({"epochs", "maxSteps", "maxBadSteps", "evaluation", "command", "code", "config"}),
    "workers": frozenset(
        {"count", "min", "resizeCooldown", "onDemandAfter", "poolPatience", "nodeCheck", "onStraggler"}
    ),
    "storage": frozenset({"size", "retain"}),
}
"""Fields that no pod template depends on: the trainer reads them from the job file, or the operator acts on them."""
_SECTIONS_WITHOUT_PODS: Final = frozenset(
    {
        *("execution", "checkpoint", "retry", "deadline", "maxCost", "cleanup", "suspend", "output", "serving"),
        "ttlSecondsAfterFinished",
    }
)
"""Sections that no pod template depends on."""
_POOL_FIELDS_WITHOUT_PODS: Final = ("price", "max", "after")
"""Fields of a pool that no pod template depends on."""


@dataclass(frozen=True)
class Defaults:
    """Default image of the trainer, and the version of Ray in it."""

    image: str
    ray_version: str

    @classmethod
    def of(cls, pinned: PinnedStatus | None, settings: Settings) -> Self:
        """The pinned defaults; before the first pin, those of the operator."""
        if pinned is not None:
            return cls(pinned.default_image, pinned.default_ray_version)
        return cls(settings.image or default_image(), settings.ray_version or RAY_VERSION)


def resolve_as_pinned(
    job: FinetuneJob, pinned: PinnedStatus | None, provider_ids: Sequence[str], settings: Settings, uid: str
) -> ResolvedJob:
    """The resolved job, with the pinned provider and defaults if there is a pin.

    Raises:
        StalledError: The spec cannot be applied in this cluster.
    """
    defaults = Defaults.of(pinned, settings)
    return resolve(
        job,
        _provider(job, pinned, provider_ids),
        uid=uid,
        operator_namespace=settings.namespace,
        monitoring_namespace=settings.monitoring_namespace,
        image=defaults.image,
        ray_version=defaults.ray_version,
    )


def pin(resolved: ResolvedJob, pinned: PinnedStatus | None, settings: Settings) -> PinnedStatus:
    """The pin unchanged, or a new one if a field has changed that the pods depend on.

    Raises:
        StalledError: The pod templates are invalid.
    """
    inputs = digest(_inputs(resolved))
    if pinned is not None and pinned.inputs == inputs:
        return pinned
    spec = ray_cluster(resolved, Replicas(0))["spec"]
    for template in _templates(spec).values():
        template["metadata"].setdefault("annotations", {})[TEMPLATE_ANNOTATION] = digest(template)
    defaults = Defaults.of(pinned, settings)
    return PinnedStatus(
        image=resolved.image,
        default_image=defaults.image,
        default_ray_version=defaults.ray_version,
        provider=resolved.provider.name.value,
        inputs=inputs,
        ray_cluster=json.dumps(spec, separators=(",", ":")),
    )


def pinned_cluster(resolved: ResolvedJob, pinned: PinnedStatus, replicas: Replicas, *, suspend: bool) -> dict[str, Any]:
    """The manifest of the RayCluster: as pinned, with this number of workers, or suspended.

    ``spec.suspend`` is always written: KubeRay ends a suspension only when the field is false. In a queue it is never
    written, because there it belongs to Kueue (``ray_cluster_without_spec`` has why).
    """
    spec = json.loads(pinned.ray_cluster)
    for group in spec["workerGroupSpecs"]:
        replicas.scale(group, resolved.job.spec.workers.count)
    if not resolved.job.spec.cluster.queue_name:
        spec["suspend"] = suspend
    return ray_cluster_without_spec(resolved) | {"spec": spec}


def template_hashes(pinned: PinnedStatus) -> dict[str, str]:
    """Hash of the pod template by ``head`` or name of the worker group; pods of another one are outdated_pods."""
    templates = _templates(json.loads(pinned.ray_cluster))
    return {name: template["metadata"]["annotations"][TEMPLATE_ANNOTATION] for name, template in templates.items()}


def _templates(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "head": spec["headGroupSpec"]["template"],
        **{group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]},
    }


def _inputs(resolved: ResolvedJob) -> dict[str, Any]:
    """All that the RayCluster depends on: fields of the spec, the provider and the image."""
    spec = deepcopy(resolved.job.model_dump(mode="json", exclude_defaults=True)["spec"])
    for section in _SECTIONS_WITHOUT_PODS:
        spec.pop(section, None)
    for section, names in _FIELDS_WITHOUT_PODS.items():
        if section in spec:
            spec[section] = {name: value for name, value in spec[section].items() if name not in names}
    for pool in spec.get("workers", {}).get("pools", ()):
        for name in _POOL_FIELDS_WITHOUT_PODS:
            pool.pop(name, None)
    spec = {name: part for name, part in spec.items() if part != {}}
    return {"spec": spec, "provider": resolved.provider.name.value, "image": resolved.image}


def _provider(job: FinetuneJob, pinned: PinnedStatus | None, provider_ids: Sequence[str]) -> Provider:
    named = job.spec.cluster.provider
    if named != "auto":
        return PROVIDERS[ProviderName(named)]
    return PROVIDERS[ProviderName(pinned.provider)] if pinned else detect(provider_ids)
