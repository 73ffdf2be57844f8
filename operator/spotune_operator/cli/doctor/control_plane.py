"""The API server, KubeRay and spotune's own parts: are they there, and new enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from spotune.crd.definition import GROUP, VERSION, custom_resource_definition
from spotune.job import KIND
from spotune_operator.cli.doctor.check import Check, Hidden, failed, passed, warning

Manifest = Mapping[str, Any]
Path = tuple[str, ...]

OLDEST_KUBERNETES: Final = (1, 29)
"""From here on the rules of the CustomResourceDefinition (CEL with field paths) are checked by every API server."""
OLDEST_KUBERAY: Final = (1, 5, 1)
"""The first one with token authentication that works (``authOptions``)."""
_INSTALL_KUBERAY: Final = "install KubeRay 1.5.1 or newer, by its Helm chart kuberay-operator or its manifests"
_APPLY_DEFINITION: Final = "spotune crd | kubectl apply --server-side --filename -"
_INSTALL_OPERATOR: Final = (
    "install the operator: helm install spotune charts/spotune --namespace spotune-system --create-namespace --wait"
)
_FIELDS_SHOWN: Final = 4
_NOT_OURS: Final = frozenset({"description", "anyOf", "x-kubernetes-group-version-kind"})
"""What the API server adds to a schema that it publishes, or what only people read."""


def api_server(version: Manifest, server: str) -> Check:
    """The API server's version.

    Args:
        version: What ``/version`` says.
        server: Its URL.
    """
    found = tuple(int(re.sub(r"\D.*", "", str(version[part])) or 0) for part in ("major", "minor"))
    message = f"Kubernetes {str(version['gitVersion']).removeprefix('v')} at {server}"
    if found < OLDEST_KUBERNETES:
        wanted = ".".join(map(str, OLDEST_KUBERNETES))
        return failed("api-server", message, f"upgrade the cluster to Kubernetes {wanted} or newer")
    return passed("api-server", message)


def kuberay_definition(published: Manifest | None) -> Check:
    """The RayCluster that the API server knows.

    Args:
        published: OpenAPI of ``ray.io/v1``; None: the API server has no such group.
    """
    name = "kuberay-crd"
    spec = _properties(_schema_of(published, "RayCluster")).get("spec")
    if spec is None:
        return failed(name, "this cluster does not know RayClusters: KubeRay is not installed", _INSTALL_KUBERAY)
    if "authOptions" not in _properties(spec):
        message = "the RayCluster of this cluster has no authOptions: its KubeRay is older than 1.5, without tokens"
        return failed(name, message, f"{_INSTALL_KUBERAY}; helm does not upgrade definitions that are there already")
    return passed(name, "RayClusters have authOptions, so KubeRay is of 1.5 or newer")


def kuberay_operator(deployments: Sequence[Manifest] | Hidden) -> Check:
    """The Deployment of KubeRay's operator, where it can be seen."""
    name = "kuberay-operator"
    if isinstance(deployments, Hidden):
        return warning(name, f"whether it runs cannot be seen: {deployments.reason}")
    found = next(filter(_is_kuberay, deployments), None)
    if found is None:
        remedy = f"if nobody runs it elsewhere, {_INSTALL_KUBERAY}"
        return warning(name, "no Deployment of KubeRay's operator is seen: it may be run by the cloud", remedy)
    image = _image(found)
    version = re.search(r":v?(\d+)\.(\d+)\.(\d+)", image)
    if version and tuple(map(int, version.groups())) < OLDEST_KUBERAY:
        return failed(name, f"{image} is older than {'.'.join(map(str, OLDEST_KUBERAY))}", _INSTALL_KUBERAY)
    return _readiness(name, found, image)


def job_definition(published: Manifest | None) -> Check:
    """The FinetuneJob that the API server knows, against that of this version.

    Args:
        published: OpenAPI of our group; None: the API server has no such group.
    """
    name = "finetunejob-crd"
    theirs = _schema_of(published, KIND)
    if not theirs:
        return failed(name, "this cluster does not know FinetuneJobs", f"install them: {_APPLY_DEFINITION}")
    ours = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields, known = dict(_fields(ours)), dict(_fields(theirs))
    if missing := _shortest(fields.keys() - known.keys()):
        message = f"the FinetuneJob of this cluster is older than this spotune: it has no {_listed(missing)}"
        return warning(name, message, f"upgrade it: {_APPLY_DEFINITION}")
    if unknown := _shortest(known.keys() - fields.keys()):
        message = f"the FinetuneJob of this cluster is newer than this spotune, which knows no {_listed(unknown)}"
        return warning(name, message, "install the spotune of the operator's version here")
    if other := [path for path, content in fields.items() if known[path] != content]:
        message = f"the FinetuneJob of this cluster is of another version than this spotune: {_listed(other)} differ"
        return warning(name, message, f"use one version; to make it this one: {_APPLY_DEFINITION}")
    return passed(name, f"{GROUP}/{VERSION} is that of this spotune")


def operator(deployments: Sequence[Manifest] | Hidden) -> Check:
    """The Deployment of spotune's operator, where it can be seen."""
    name = "operator"
    if isinstance(deployments, Hidden):
        return warning(name, f"whether it runs cannot be seen: {deployments.reason}")
    found = next(filter(_is_ours, deployments), None)
    if found is None:
        return failed(name, "no Deployment of spotune's operator is there: jobs stay as they are", _INSTALL_OPERATOR)
    return _readiness(name, found, _image(found))


def _readiness(name: str, deployment: Manifest, image: str) -> Check:
    metadata, status = deployment["metadata"], deployment.get("status") or {}
    place = f"{metadata['namespace']}/{metadata['name']}"
    if status.get("readyReplicas"):
        return passed(name, f"{place} is ready ({image})")
    wanted = deployment["spec"].get("replicas", 1)
    if wanted == 0:
        remedy = f"kubectl scale --namespace {metadata['namespace']} deployment/{metadata['name']} --replicas=1"
        return failed(name, f"{place} is scaled to 0 ({image})", remedy)
    remedy = f"kubectl describe --namespace {metadata['namespace']} deployment/{metadata['name']} says why"
    return failed(name, f"{place} is not ready ({image})", remedy)


def _is_ours(deployment: Manifest) -> bool:
    labels = deployment["metadata"].get("labels") or {}
    ours = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}
    return bool(ours.items() <= labels.items())


def _is_kuberay(deployment: Manifest) -> bool:
    """By the labels of the Helm chart and of the plain manifests, or by the image."""
    labels = deployment["metadata"].get("labels") or {}
    named = {labels.get("app.kubernetes.io/name"), labels.get("app.kubernetes.io/component")}
    return "kuberay-operator" in named or "kuberay/operator" in _image(deployment)


def _image(deployment: Manifest) -> str:
    containers: list[Mapping[str, str]] = deployment["spec"]["template"]["spec"]["containers"]
    return containers[0]["image"]


def _schema_of(published: Manifest | None, kind: str) -> Mapping[str, Any]:
    """The schema of a kind in an OpenAPI document; empty if it has none."""
    schemas: Mapping[str, Any] = ((published or {}).get("components") or {}).get("schemas") or {}
    return next((schema for name, schema in schemas.items() if name.endswith(f".{kind}")), {})


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema.get("properties") or {}
    return found


def _fields(schema: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and rules of every field below spec and status; the rest is Kubernetes' own."""
    for name, field in _properties(schema).items():
        if path or name in ("spec", "status"):
            yield (*path, name), _own(field)
            yield from _fields(field, (*path, name))
    items = schema.get("items")
    if isinstance(items, Mapping):
        yield from _fields(items, path)


def _own(field: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema says of a field itself: type, default, limits, rules."""
    return {
        key: value
        for key, value in field.items()
        if key not in {"properties", "items", "additionalProperties"} | _NOT_OURS
    }


def _shortest(paths: Iterable[Path]) -> list[Path]:
    """The paths, without those that are in one of the others."""
    every = set(paths)
    return sorted(path for path in every if not any(path[:length] in every for length in range(1, len(path))))


def _listed(paths: Sequence[Path]) -> str:
    names = [".".join(path) for path in paths[:_FIELDS_SHOWN]]
    more = f" and {len(paths) - len(names)} more" if len(paths) > len(names) else ""
    return ", ".join(names) + more
