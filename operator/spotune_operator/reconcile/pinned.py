"""What a job is run with until it ends: the image and the RayCluster as they were rendered at its start.

An operator of another version has other defaults and other templates. A running job keeps its own: they are in its
status, and are rendered anew only when the part of the spec that pods are made from has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Self

from spotune.job import FinetuneJob, PinnedStatus
from spotune_operator.children.raycluster import ON_DEMAND_GROUP, Replicas, ray_cluster, ray_cluster_without_spec
from spotune_operator.children.resolved_job import RAY_VERSION, PlacedJob, default_image, place
from spotune_operator.observe.state import TEMPLATE_ANNOTATION, digest
from spotune_operator.providers import PROVIDERS, Provider, ProviderName, detect
from spotune_operator.settings import Settings

_HOW: Final[Mapping[str, frozenset[str]]] = {
    "training": frozenset({"epochs", "maxSteps", "maxBadSteps", "evaluation"}),
    "workers": frozenset({"count", "min", "resizeCooldown", "onDemandAfter"}),
    "storage": frozenset({"size", "retain"}),
}
"""Fields that no pod is made from: the trainer reads them from its file, or the operator acts on them itself."""
_HOW_SECTIONS: Final = frozenset({"execution", "checkpoint", "retry", "cleanup", "suspend", "output"})
"""Whole sections of that kind."""


@dataclass(frozen=True)
class Defaults:
    """The image of a job that names none, and its Ray."""

    image: str
    ray_version: str

    @classmethod
    def of(cls, pinned: PinnedStatus | None, settings: Settings) -> Self:
        """As they are pinned, or as the operator has them now."""
        if pinned is not None:
            return cls(pinned.default_image, pinned.default_ray_version)
        return cls(settings.image or default_image(), settings.ray_version or RAY_VERSION)


def place_as_pinned(
    job: FinetuneJob, pinned: PinnedStatus | None, provider_ids: Sequence[str], settings: Settings, uid: str
) -> PlacedJob:
    """The job with everything decided about where it runs; what is pinned stays as it was decided.

    Raises:
        StalledError: The job asks for what cannot be in this cluster.
    """
    defaults = Defaults.of(pinned, settings)
    return place(
        job,
        _provider(job, pinned, provider_ids),
        uid=uid,
        operator_namespace=settings.namespace,
        monitoring_namespace=settings.monitoring_namespace,
        image=defaults.image,
        ray_version=defaults.ray_version,
    )


def pin(placed: PlacedJob, pinned: PinnedStatus | None, settings: Settings) -> PinnedStatus:
    """The pin as it was, or a new one if the spec's part that pods are made from has changed.

    Raises:
        StalledError: The job's pods cannot be made.
    """
    inputs = digest(_inputs(placed))
    if pinned is not None and pinned.inputs == inputs:
        return pinned
    spec = ray_cluster(placed, Replicas(0))["spec"]
    for template in _templates(spec).values():
        template["metadata"].setdefault("annotations", {})[TEMPLATE_ANNOTATION] = digest(template)
    defaults = Defaults.of(pinned, settings)
    return PinnedStatus(
        image=placed.image,
        default_image=defaults.image,
        default_ray_version=defaults.ray_version,
        provider=placed.provider.name.value,
        inputs=inputs,
        ray_cluster=json.dumps(spec, separators=(",", ":")),
    )


def pinned_cluster(placed: PlacedJob, pinned: PinnedStatus, replicas: Replicas, *, suspend: bool) -> dict[str, Any]:
    """The RayCluster to apply: as pinned, with so many workers, or with its pods on their way out.

    ``spec.suspend`` is always said: KubeRay ends a suspension only when it is told false. But in a queue it is never,
    for there it belongs to Kueue (``ray_cluster_without_spec`` has why).
    """
    spec = json.loads(pinned.ray_cluster)
    for group in spec["workerGroupSpecs"]:
        group["replicas"] = replicas.on_demand if group["groupName"] == ON_DEMAND_GROUP else replicas.workers
        group["maxReplicas"] = max(placed.job.spec.workers.count, group["replicas"])
    if not placed.job.spec.cluster.queue_name:
        spec["suspend"] = suspend
    return ray_cluster_without_spec(placed) | {"spec": spec}


def template_hashes(pinned: PinnedStatus) -> dict[str, str]:
    """Hash of the pod template by ``head`` or name of the worker group; pods of another one are outdated."""
    templates = _templates(json.loads(pinned.ray_cluster))
    return {name: template["metadata"]["annotations"][TEMPLATE_ANNOTATION] for name, template in templates.items()}


def _templates(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "head": spec["headGroupSpec"]["template"],
        **{group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]},
    }


def _inputs(placed: PlacedJob) -> dict[str, Any]:
    """What the RayCluster is made from, of the spec and of what was decided about it."""
    spec = deepcopy(placed.job.model_dump(mode="json", exclude_defaults=True)["spec"])
    for section in _HOW_SECTIONS:
        spec.pop(section, None)
    for section, names in _HOW.items():
        if section in spec:
            spec[section] = {name: value for name, value in spec[section].items() if name not in names}
    spec = {name: part for name, part in spec.items() if part != {}}
    return {"spec": spec, "provider": placed.provider.name.value, "image": placed.image}


def _provider(job: FinetuneJob, pinned: PinnedStatus | None, provider_ids: Sequence[str]) -> Provider:
    named = job.spec.cluster.provider
    if named != "auto":
        return PROVIDERS[ProviderName(named)]
    return PROVIDERS[ProviderName(pinned.provider)] if pinned else detect(provider_ids)
