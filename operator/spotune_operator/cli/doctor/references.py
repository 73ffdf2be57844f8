"""Checks that the objects exist that jobs and services name, and have what is needed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune_operator.cli.doctor.check import Check, failed, passed, warning
from spotune_operator.errors import NotFoundError, RefusedError

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Reference:
    """An object that a job or service names.

    Attributes:
        field: Path of the field.
        kind: Kind of the object.
        path: URL path of the object.
        effect: What happens without it.
        remedy: What to do without it.
        key: Of a Secret: the key that it must have; empty: none.
        port: Of a Service: the port that it must have; 0: none.
        is_essential: Whether the job or service cannot run without it.
    """

    field: str
    kind: str
    path: str
    effect: str
    remedy: str
    key: str = ""
    port: int = 0
    is_essential: bool = True

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.path.rpartition("/")[2]


def named_objects(
    name: str,
    kind: str,
    objects: Sequence[Manifest],
    references: Callable[[Manifest], Iterable[Reference]],
    get: Callable[[str], Manifest],
) -> Iterator[Check]:
    """One check per object that is missing or incomplete; one that passes if there is none; none without objects.

    Args:
        name: Name of the check.
        kind: Kind of the objects.
        objects: The jobs or services.
        references: The objects that one of them names.
        get: Returns an object of the API server by its URL path.

    Raises:
        KubernetesError: The API server does not answer.
    """
    hidden, found_problem = dict[str, None](), False
    for each in objects:
        for reference in references(each):
            try:
                problem = _problem(reference, get(reference.path))
            except NotFoundError:
                problem = f"there is no {reference.kind} {reference.name}"
            except RefusedError:
                hidden[f"{reference.kind} {reference.name}"] = None
                continue
            if problem:
                found_problem = True
                message = f"{each['metadata']['name']}: {reference.field}: {problem}: {reference.effect}"
                yield (failed if reference.is_essential else warning)(name, message, reference.remedy)
    if hidden:
        yield warning(name, f"you may not check whether these exist: {', '.join(hidden)}")
    elif objects and not found_problem:
        yield passed(name, f"all objects that the {len(objects)} {kind}(s) name exist")


def secret(field: str, given: Mapping[str, Any], namespace: str) -> Reference:
    """A Secret with the key that pods need from it.

    Args:
        field: Path of the field.
        given: Name and key; without a key, all keys become environment variables.
        namespace: Namespace of the job or service.
    """
    key = given.get("key", "")
    source = f"--from-file={key}=FILE" if key else "--from-env-file=FILE"
    return Reference(
        field,
        "Secret",
        f"/api/v1/namespaces/{namespace}/secrets/{given['name']}",
        "pods that need it do not start",
        f"kubectl create secret generic {given['name']} --namespace {namespace} {source}; or correct the field",
        key=key,
    )


def claim(field: str, name: str, namespace: str, effect: str) -> Reference:
    """A PersistentVolumeClaim.

    Args:
        field: Path of the field.
        name: Name of the claim.
        namespace: Namespace of the job or service.
        effect: What happens without it.
    """
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
    return Reference(field, "PersistentVolumeClaim", path, effect, "create the claim, or correct the name")


def service_account(field: str, name: str, namespace: str) -> Reference:
    """The service account of pods."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
    return Reference(field, "ServiceAccount", path, "no pod can be created", "create it, or correct the field")


def _problem(reference: Reference, found: Manifest) -> str:
    """What an existing object lacks; empty if nothing."""
    keys = found.get("data") or {}
    if reference.key and reference.key not in keys:
        return f"Secret {reference.name} has no key {reference.key}"
    ports = [each["port"] for each in (found.get("spec") or {}).get("ports") or ()] if reference.port else []
    if reference.port and reference.port not in ports:
        return f"Service {reference.name} has no port {reference.port}"
    return ""
