"""The ModelService: a trained model behind an HTTP endpoint."""

from typing import Final, Literal, Self

from pydantic import model_validator

from spotune.custom_resource.base import API_VERSION, Section, invalid
from spotune.custom_resource.metadata import Metadata
from spotune.service.spec import ModelServiceSpec
from spotune.service.status import ModelServiceStatus

SERVICE_KIND: Final = "ModelService"


class ModelService(Section):
    """A model served with OpenAI's API by Ray Serve, on spot GPUs."""

    api_version: Literal["spotune.dev/v1alpha1"] = API_VERSION
    """API version."""
    kind: Literal["ModelService"] = SERVICE_KIND
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace and labels."""
    spec: ModelServiceSpec
    """Which model to serve and how."""
    status: ModelServiceStatus | None = None
    """Health of the service, written by the operator."""

    @property
    def model_id(self) -> str:
        """Id of the model in the API."""
        return self.spec.model.name or self.metadata.name

    @model_validator(mode="after")
    def _check_model_ids(self) -> Self:
        if self.model_id in (adapter.name for adapter in self.spec.adapters):
            reason = f"must not contain the model's own id {self.model_id!r}: every adapter needs its own name"
            invalid("spec.adapters", reason)
        return self
