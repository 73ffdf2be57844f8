"""Fields about pods that jobs and services share."""

from typing import Annotated, Any

from pydantic import Field

from spotune.custom_resource.base import Section
from spotune.units.quantities import Quantity

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class ResourcesSpec(Section):
    """Kubernetes resource requirements of a pod's Ray container."""

    requests: dict[str, Quantity] = Field(default={})
    """Requested amounts by resource name: cpu, memory, ephemeral-storage."""
    limits: dict[str, Quantity] = Field(default={})
    """Maximum amounts by resource name."""
