"""Jobs, sweeps and services as the API server returns them, with their Pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from spotune.crd.definition import FINETUNE_JOBS, FINETUNE_SWEEPS, MODEL_SERVICES, CustomResource
from spotune.custom_resource import API_VERSION, Condition
from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune.job_file.load import parse_resource, read_document_of_kind
from spotune.job_file.yaml_file import Document
from spotune.service import ModelService, ModelServiceStatus
from spotune.sweep import FinetuneSweep, FinetuneSweepStatus
from spotune_client.cluster.jobs import conditions_of, is_current, is_true, outcome, phase, status_of

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=BaseModel)
_SENT: Final[tuple[str, ...]] = ("apiVersion", "kind", "metadata", "spec")


class Stored(Generic[M, S]):
    """An object as the API server returned it.

    Args:
        raw: The object, with all fields that the API server has, also those of newer versions of spotune.
    """

    resource: ClassVar[CustomResource]
    _model: ClassVar[type[BaseModel]]
    _status: ClassVar[type[BaseModel]]

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw: Mapping[str, Any] = raw

    def __repr__(self) -> str:
        return f"<{self.resource.kind} {self.namespace}/{self.name}: {self.phase}>"

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        found: Mapping[str, str] = self.raw["metadata"].get("labels") or {}
        return found

    @property
    def phase(self) -> str:
        """Its phase, for display: ``New`` before the operator has seen it, ``Deleting`` while it is deleted."""
        return phase(self.raw)

    @property
    def conditions(self) -> list[Condition]:
        """Its conditions, in the operator's order."""
        return [Condition.model_validate(found) for found in conditions_of(self.raw)]

    def is_true(self, condition: str) -> bool:
        """Whether it has a condition of this type whose status is True."""
        return is_true(self.raw, condition)

    @property
    def outcome(self) -> Literal["Complete", "Failed"] | None:
        """How it ended; None if it has not ended, or if its spec has changed since."""
        return outcome(self.raw)

    @property
    def is_current(self) -> bool:
        """Whether the operator has processed the current spec."""
        return is_current(self.raw)

    @cached_property
    def model(self) -> M:
        """The Pydantic model of metadata and spec, without the status.

        Raises:
            JobError: The spec has fields that this version of spotune does not know.
        """
        found = parse_resource(Document({key: value for key, value in self.raw.items() if key != "status"}))
        assert isinstance(found, self._model)
        return found  # type: ignore[return-value] # M is _model, which a ClassVar cannot say

    @cached_property
    def status(self) -> S:
        """The Pydantic model of the status; fields of newer versions are left out.

        Raises:
            JobError: The status does not fit this version of spotune.
        """
        try:
            return self._status.model_validate(status_of(self.raw))  # type: ignore[return-value] # as above
        except ValidationError as error:
            raise JobError(f"{self.name} has a status that this version of spotune cannot read: {error}") from error


class StoredJob(Stored[FinetuneJob, FinetuneJobStatus]):
    """A FinetuneJob as the API server returned it."""

    resource = FINETUNE_JOBS
    _model = FinetuneJob
    _status = FinetuneJobStatus


class StoredSweep(Stored[FinetuneSweep, FinetuneSweepStatus]):
    """A FinetuneSweep as the API server returned it."""

    resource = FINETUNE_SWEEPS
    _model = FinetuneSweep
    _status = FinetuneSweepStatus


class StoredService(Stored[ModelService, ModelServiceStatus]):
    """A ModelService as the API server returned it."""

    resource = MODEL_SERVICES
    _model = ModelService
    _status = ModelServiceStatus


Given = FinetuneJob | FinetuneSweep | ModelService | Mapping[str, Any] | str | Path
"""An object to send: a Pydantic model, its content as in YAML, or the path of a YAML file."""


def manifest_of(given: Given, resource: CustomResource) -> dict[str, Any]:
    """The manifest to send, with the fields that the caller has set and no defaults. It is validated first.

    Args:
        given: The object.
        resource: The kind that it must have.

    Raises:
        UsageError: The file does not exist, or the object is of another kind.
        JobError: The object is invalid; ``problems`` lists all errors.
    """
    if isinstance(given, BaseModel):
        content = given.model_dump(mode="json", exclude_unset=True, exclude={"status"})
        content |= {"apiVersion": API_VERSION, "kind": getattr(given, "kind", "")}
    elif isinstance(given, str | Path):
        content = dict(read_document_of_kind(given, resource.kind).content)
    else:
        content = {"apiVersion": API_VERSION, "kind": resource.kind} | dict(given)
    if content["kind"] != resource.kind:
        raise UsageError(f"this is a {content['kind']}, where a {resource.kind} is needed")
    manifest: dict[str, Any] = {key: content[key] for key in _SENT if key in content}
    parse_resource(Document(manifest))
    return manifest
