"""Name, namespace and labels of a FinetuneJob or ModelService."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from spotune.custom_resource.base import Section, invalid

MAX_NAME_LENGTH = 40
"""Kubernetes allows 63 characters in a label. Names of pods and services add a prefix and suffix to it."""

NAME_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label, as Kubernetes requires for names of pods and services."""

_SERVER_FIELDS = frozenset(
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
"""Fields that the API server adds. They are ignored, so the output of `kubectl get -o yaml` is a valid job file."""


def _check_dns_label(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        invalid(
            "", f"{name!r} is not a valid Kubernetes name: use a-z, 0-9 and -, and start and end with a letter or digit"
        )
    return name


DnsLabel = AfterValidator(_check_dns_label)
"""Checks that a string is a DNS label."""

MAX_LABEL_VALUE = 63
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_LABEL_PREFIX = rf"(?=.{{1,253}}/){NAME_PATTERN}(\.{NAME_PATTERN})*/"
_ALLOWED = f"use letters, digits, -, _ and ., at most {MAX_LABEL_VALUE}, and start and end with a letter or digit"


def _check_label_value(value: str) -> str:
    if len(value) > MAX_LABEL_VALUE or not re.fullmatch(_LABEL_VALUE, value):
        invalid("", f"{value!r} is not a valid value of a label: {_ALLOWED}")
    return value


def _check_label_key(key: str) -> str:
    name = re.sub(f"^{_LABEL_PREFIX}", "", key)
    if not name or len(name) > MAX_LABEL_VALUE or not re.fullmatch(_LABEL_VALUE, name):
        invalid("", f"{key!r} is not a valid name of a label: {_ALLOWED}; before it may be a domain and /")
    return key


LabelValue = Annotated[
    str,
    AfterValidator(_check_label_value),
    WithJsonSchema({"type": "string", "maxLength": MAX_LABEL_VALUE, "pattern": f"^{_LABEL_VALUE}$"}),
]
"""Value of a label of Kubernetes; it may be empty."""
LabelKey = Annotated[str, AfterValidator(_check_label_key), WithJsonSchema({"type": "string"})]
"""Name of a label of Kubernetes. The API server cannot check names in a mapping of a custom resource."""


def _check_name_length(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH:
        limit = f"at most {MAX_NAME_LENGTH} are allowed, because pod names are made from it"
        invalid("", f"{name!r} has {len(name)} characters; {limit}")
    return name


class Metadata(Section):
    """Kubernetes metadata, as far as a user writes it."""

    name: Annotated[str, AfterValidator(_check_dns_label), AfterValidator(_check_name_length)]
    """Name: a-z, 0-9 and -, at most 40 characters."""
    namespace: Annotated[str, AfterValidator(_check_dns_label)] = "default"
    """Namespace."""
    labels: dict[str, str] = Field(default={})
    """Labels."""
    annotations: dict[str, str] = Field(default={})
    """Annotations."""

    @model_validator(mode="before")
    @classmethod
    def _drop_server_fields(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name not in _SERVER_FIELDS}
