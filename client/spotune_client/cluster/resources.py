"""FinetuneJobs and ModelServices as the API server returns them: list them, and find the one that a user names.

They are plain mappings and not Pydantic models, so that this version can show objects of other versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from spotune.crd.definition import FINETUNE_JOBS, GROUP, MODEL_SERVICES, VERSION, CustomResource
from spotune.custom_resource.metadata import NAME_PATTERN
from spotune.custom_resource.object_names import COMPONENT_LABEL
from spotune.errors import KubernetesError, NotFoundError, RefusedError, UsageError
from spotune_client.cluster.client import Cluster, Manifest

_GROUP_VERSION: Final = f"{GROUP}/{VERSION}"
_NAME: Final = rf"{NAME_PATTERN}(\.{NAME_PATTERN})*"
_NAMES_SHOWN: Final = 10


def list_objects(cluster: Cluster, resource: CustomResource, *, everywhere: bool = False) -> list[Manifest]:
    """The objects of a kind in the namespace, or in all namespaces, sorted by namespace and name.

    Raises:
        KubernetesError: The user may not list them, or the kind is not installed.
    """
    plural = resource.plural
    path = f"/apis/{_GROUP_VERSION}/{plural}" if everywhere else object_path(cluster, resource)
    try:
        found = cluster.items(path)
    except NotFoundError as error:
        raise KubernetesError(
            f"this cluster has no {resource.kind} resource: spotune is not installed, or this is the wrong cluster. "
            "Run `spotune doctor` to see what is missing",
            error.status,
        ) from error
    return sorted(found, key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"]))


def get_object(cluster: Cluster, resource: CustomResource, name: str) -> Manifest:
    """Get an object by name.

    Raises:
        UsageError: It does not exist; the message suggests a similar name.
        KubernetesError: The user may not read it, or its kind is not installed.
    """
    try:
        return _get(cluster, resource, name)
    except NotFoundError as error:
        names = [item["metadata"]["name"] for item in list_objects(cluster, resource)]
        raise UsageError(unknown_name_message(resource, name, cluster.namespace, names)) from error


def get_visible(cluster: Cluster, resource: CustomResource, name: str) -> Manifest | None:
    """Get an object by name; None if it does not exist, or if the user may not see it."""
    try:
        return _get(cluster, resource, name)
    except (NotFoundError, RefusedError):
        return None


def _get(cluster: Cluster, resource: CustomResource, name: str) -> Manifest:
    if not re.fullmatch(_NAME, name):  # a path without a name, or with "..", is that of other objects
        raise NotFoundError(f"{name!r} cannot be a name")
    return cluster.get(object_path(cluster, resource, name))


def object_path(cluster: Cluster, resource: CustomResource, name: str = "") -> str:
    """URL path of an object, or of all objects of its kind in the namespace."""
    return cluster.path(resource.plural, name, _GROUP_VERSION)


def unknown_name_message(resource: CustomResource, name: str, namespace: str, names: Sequence[str]) -> str:
    """The message for an object that does not exist, with a similar name or the existing names."""
    near = get_close_matches(name, names, n=1)
    name = name or '""'
    if near:
        return f"namespace {namespace} has no {resource.kind} {name}; did you mean {near[0]}?"
    existing = "it has none"
    if names:
        existing = f"it has {', '.join(names[:_NAMES_SHOWN])}{' and more' if len(names) > _NAMES_SHOWN else ''}"
    return f"namespace {namespace} has no {resource.kind} {name}: {existing} (use --namespace for another namespace)"


def parse_name(text: str) -> tuple[CustomResource | None, str]:
    """Kind and name of an object as kubectl writes them: ``t5-sql``, ``ftj/t5-sql``, ``ms/t5-sql``.

    Returns:
        The kind is None for a name alone.

    Raises:
        UsageError: The kind is unknown, or the name is missing.
    """
    kind, slash, name = text.rpartition("/")
    if not slash:
        return None, text
    for resource in (FINETUNE_JOBS, MODEL_SERVICES):
        if name and kind.lower() in (resource.kind.lower(), resource.plural, resource.short_name):
            return resource, name
    raise UsageError(
        f"{text} names no job and no service: write ftj/NAME for a FinetuneJob, ms/NAME for a ModelService"
    )


def job_name(text: str, command: str) -> str:
    """The name of a job, for a command that knows jobs alone.

    Raises:
        UsageError: A service is named.
    """
    resource, name = parse_name(text)
    if resource is MODEL_SERVICES:
        raise UsageError(f"`spotune {command}` works on FinetuneJobs, and {text} is a ModelService")
    return name


def find_object(cluster: Cluster, text: str) -> tuple[CustomResource, Manifest]:
    """The object that a user names. A name alone means the job, or the service if there is no such job.

    Raises:
        UsageError: It does not exist.
        KubernetesError: The user may not read it, or its kind is not installed.
    """
    resource, name = parse_name(text)
    if resource is not None:
        return resource, get_object(cluster, resource, name)
    try:
        return FINETUNE_JOBS, get_object(cluster, FINETUNE_JOBS, name)
    except UsageError as error:
        service = get_visible(cluster, MODEL_SERVICES, name)
        if service is None:
            raise UsageError(f"{error}{_similar_service(cluster, name)}") from error
        return MODEL_SERVICES, service


def _similar_service(cluster: Cluster, name: str) -> str:
    """The end of a message with the ModelService of a similar name; empty without one."""
    try:
        names = [item["metadata"]["name"] for item in list_objects(cluster, MODEL_SERVICES)]
    except KubernetesError:
        return ""
    near = get_close_matches(name, names, n=1)
    return f" (there is a ModelService ms/{near[0]})" if near else ""


def pods_with(cluster: Cluster, label: str, name: str, component: str = "") -> list[Manifest]:
    """The pods of an object, including terminating ones.

    Args:
        cluster: The cluster with the object.
        label: Label of its pods; the value is its name.
        name: Name of the object.
        component: Component of the pods; empty: all.
    """
    labels = [f"{label}={name}", *([f"{COMPONENT_LABEL}={component}"] if component else [])]
    return cluster.items(cluster.path("pods"), labelSelector=",".join(labels))


def label_of(found: Mapping[str, Any], label: str) -> str:
    """The value of a label; empty without it."""
    value: str = (found["metadata"].get("labels") or {}).get(label, "")
    return value
