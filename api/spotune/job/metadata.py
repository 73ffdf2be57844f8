"""Name, namespace and labels of a FinetuneJob."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from spotune.job.base import Section, invalid

MAX_NAME_LENGTH = 40
"""Kubernetes allows 63 characters in a label; names of pods and services made from the job's name need the rest."""

NAME_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label: what pods and services may be called."""

_WRITTEN_BY_THE_SERVER = frozenset(
    {
        "creationTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)
"""What the API server adds: passed over, so that the output of kubectl get -o yaml is a job file too."""


def _check_dns_label(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        invalid("", f"{name!r} is not a name that Kubernetes takes: a-z, 0-9 and - only, no - at either end")
    return name


def _check_name_length(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH:
        reason = f"{name!r} has {len(name)} characters; {MAX_NAME_LENGTH} at most leave room for the names of its pods"
        invalid("", reason)
    return name


class Metadata(Section):
    """Kubernetes metadata, as far as a user writes it."""

    name: Annotated[str, AfterValidator(_check_dns_label), AfterValidator(_check_name_length)]
    """Name of the job: a-z, 0-9 and -, at most 40 characters."""
    namespace: Annotated[str, AfterValidator(_check_dns_label)] = "default"
    """Namespace of the job."""
    labels: dict[str, str] = Field(default={})
    """Labels."""
    annotations: dict[str, str] = Field(default={})
    """Annotations."""

    @model_validator(mode="before")
    @classmethod
    def _pass_over_server_fields(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name not in _WRITTEN_BY_THE_SERVER}
