"""Checks of the API server, KubeRay and spotune's CRDs and operator: installed, and recent enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from spotune.crd.definition import (
    FINETUNE_JOBS,
    GROUP,
    MODEL_SERVICES,
    VERSION,
    CustomResource,
    custom_resource_definition,
)
from spotune.job import KIND
from spotune.service import SERVICE_KIND
from spotune_operator.cli.doctor.check import Check, Forbidden, failed, passed, warning
from spotune_operator.kube.requirements import (
    INSTALL_KUBERAY,
    OLDEST_KUBERAY,
    UPGRADE_KUBERAY,
    UPGRADE_KUBERNETES,
    is_too_old,
    kuberay_problem,
    kubernetes_version,
    properties_of,
    schema_of,
)

Manifest = Mapping[str, Any]
Path = tuple[str, ...]

_APPLY_DEFINITION: Final = "spotune crd | kubectl apply --server-side --filename -"
_INSTALL_OPERATOR: Final = (
    "install the operator: helm install spotune charts/spotune --namespace spotune-system --create-namespace --wait "
    "--set-string image.repository=REGISTRY/spotune/operator --set-string trainer.image=REGISTRY/spotune/trainer:TAG"
)
_RAY_SERVICE_FIELDS: Final = ("upgradeStrategy", "rayClusterDeletionDelaySeconds", "excludeHeadPodFromServeSvc")
_FIELDS_SHOWN: Final = 4
_IGNORED_KEYWORDS: Final = frozenset({"description", "anyOf", "x-kubernetes-group-version-kind"})
"""Keywords that the API server adds to a published schema, and texts; the comparison ignores them."""


def api_server(version: Manifest, server: str) -> Check:
    """The API server's version.

    Args:
        version: Response of ``/version``.
        server: URL of the API server.
    """
    message = f"Kubernetes {kubernetes_version(version)} at {server}"
    if is_too_old(version):
        return failed("api-server", message, UPGRADE_KUBERNETES)
    return passed("api-server", message)


def kuberay_definition(published: Manifest | None) -> Check:
    """The CRD of RayClusters.

    Args:
        published: OpenAPI document of ``ray.io/v1``; None if the API server does not serve this group.
    """
    name = "kuberay-crd"
    if problem := kuberay_problem(published):
        return failed(name, *problem)
    return passed(name, "the RayCluster CRD has authOptions, so KubeRay is 1.5 or newer")


def kuberay_operator(deployments: Sequence[Manifest] | Forbidden) -> Check:
    """The Deployment of KubeRay's operator, if the user may list Deployments."""
    name = "kuberay-operator"
    if isinstance(deployments, Forbidden):
        return warning(name, f"cannot check whether it runs: {deployments.reason}")
    found = next(filter(_is_kuberay, deployments), None)
    if found is None:
        remedy = f"unless your cloud provider runs it, {INSTALL_KUBERAY}"
        return warning(name, "no Deployment of KubeRay's operator was found; the cloud provider may run it", remedy)
    image = _image(found)
    version = re.search(r":v?(\d+)\.(\d+)\.(\d+)", image)
    if version and tuple(map(int, version.groups())) < OLDEST_KUBERAY:
        return failed(name, f"{image} is older than {'.'.join(map(str, OLDEST_KUBERAY))}", INSTALL_KUBERAY)
    return _readiness(name, found, image)


def job_definition(published: Manifest | None) -> Check:
    """The CRD of FinetuneJobs, compared with the one of this spotune version.

    Args:
        published: OpenAPI document of spotune's API group; None if the API server does not serve it.
    """
    theirs = schema_of(published, KIND)
    if not theirs:
        message = "FinetuneJobs are not defined in this cluster"
        return failed(f"{KIND.lower()}-crd", message, f"install the CRD: {_APPLY_DEFINITION}")
    return _comparison(FINETUNE_JOBS, theirs)


def service_definition(published: Manifest | None) -> Check:
    """The CRD of ModelServices, compared with the one of this spotune version; ``published`` as for jobs."""
    theirs = schema_of(published, SERVICE_KIND)
    if not theirs:
        message = "ModelServices are not defined in this cluster: it can train models and not serve them"
        return warning(f"{SERVICE_KIND.lower()}-crd", message, f"install the CRD: {_APPLY_DEFINITION}")
    return _comparison(MODEL_SERVICES, theirs)


def ray_service_definition(published: Manifest | None) -> Check:
    """The CRD of RayServices, with the fields that ModelServices need.

    Args:
        published: OpenAPI document of ``ray.io/v1``; None if the API server does not serve this group.
    """
    name, remedy = "rayservice-crd", UPGRADE_KUBERAY
    spec = properties_of(schema_of(published, "RayService")).get("spec")
    if spec is None:
        return warning(name, "RayServices are not defined in this cluster: it cannot serve models", remedy)
    if missing := [field for field in _RAY_SERVICE_FIELDS if field not in properties_of(spec)]:
        message = f"the RayService CRD has no {' and no '.join(missing)}: KubeRay is too old to serve models"
        return warning(name, message, remedy)
    return passed(name, "the RayService CRD has all fields that ModelServices need")


def _comparison(resource: CustomResource, theirs: Mapping[str, Any]) -> Check:
    """Compare a CRD of the cluster with the one of this spotune version."""
    name, kind = f"{resource.kind.lower()}-crd", resource.kind
    ours = custom_resource_definition(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields, known = dict(_fields(ours)), dict(_fields(theirs))
    if missing := _shortest(fields.keys() - known.keys()):
        message = f"the {kind} CRD is older than this spotune: it lacks {_joined(missing)}"
        return warning(name, message, f"upgrade it: {_APPLY_DEFINITION}")
    if unknown := _shortest(known.keys() - fields.keys()):
        message = f"the {kind} CRD is newer than this spotune: this version lacks {_joined(unknown)}"
        return warning(name, message, "install the operator's version of spotune on this machine")
    if other := [path for path, content in fields.items() if known[path] != content]:
        message = f"the {kind} CRD differs from this spotune's version in {_joined(other)}"
        return warning(name, message, f"use the same version; to apply this one: {_APPLY_DEFINITION}")
    return passed(name, f"the {kind} CRD of {GROUP}/{VERSION} matches this spotune")


def operator(deployments: Sequence[Manifest] | Forbidden) -> Check:
    """The Deployment of spotune's operator, if the user may list Deployments."""
    name = "operator"
    if isinstance(deployments, Forbidden):
        return warning(name, f"cannot check whether it runs: {deployments.reason}")
    found = operator_deployment(deployments)
    if found is None:
        return failed(name, "no Deployment of spotune's operator was found: jobs will not start", _INSTALL_OPERATOR)
    return _readiness(name, found, _image(found))


def operator_deployment(deployments: Sequence[Manifest]) -> Manifest | None:
    """The Deployment of spotune's operator; None if there is none."""
    return next(filter(_is_ours, deployments), None)


def _readiness(name: str, deployment: Manifest, image: str) -> Check:
    metadata, status = deployment["metadata"], deployment.get("status") or {}
    place = f"{metadata['namespace']}/{metadata['name']}"
    if status.get("readyReplicas"):
        return passed(name, f"{place} is ready ({image})")
    desired = deployment["spec"].get("replicas", 1)
    if desired == 0:
        remedy = f"kubectl scale --namespace {metadata['namespace']} deployment/{metadata['name']} --replicas=1"
        return failed(name, f"{place} is scaled to 0 ({image})", remedy)
    remedy = f"find the reason: kubectl describe --namespace {metadata['namespace']} deployment/{metadata['name']}"
    return failed(name, f"{place} is not ready ({image})", remedy)


def _is_ours(deployment: Manifest) -> bool:
    labels = deployment["metadata"].get("labels") or {}
    ours = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}
    return bool(ours.items() <= labels.items())


def _is_kuberay(deployment: Manifest) -> bool:
    """Whether labels (of the Helm chart or the plain manifests) or image are those of KubeRay's operator."""
    labels = deployment["metadata"].get("labels") or {}
    named = {labels.get("app.kubernetes.io/name"), labels.get("app.kubernetes.io/component")}
    return "kuberay-operator" in named or "kuberay/operator" in _image(deployment)


def _image(deployment: Manifest) -> str:
    containers: list[Mapping[str, str]] = deployment["spec"]["template"]["spec"]["containers"]
    return containers[0]["image"]


def _fields(schema: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and constraints of every field below spec and status."""
    for name, field in properties_of(schema).items():
        if path or name in ("spec", "status"):
            yield (*path, name), _constraints(field)
            yield from _fields(field, (*path, name))
    items = schema.get("items")
    if isinstance(items, Mapping):
        yield from _fields(items, path)


def _constraints(field: Mapping[str, Any]) -> dict[str, Any]:
    """The constraints of a field itself: type, default, limits and rules, without nested fields."""
    return {
        key: value
        for key, value in field.items()
        if key not in {"properties", "items", "additionalProperties"} | _IGNORED_KEYWORDS
    }


def _shortest(paths: Iterable[Path]) -> list[Path]:
    """The paths, without those nested in another one."""
    every = set(paths)
    return sorted(path for path in every if not any(path[:length] in every for length in range(1, len(path))))


def _joined(paths: Sequence[Path]) -> str:
    names = [".".join(path) for path in paths[:_FIELDS_SHOWN]]
    more = f" and {len(paths) - len(names)} more" if len(paths) > len(names) else ""
    return ", ".join(names) + more
