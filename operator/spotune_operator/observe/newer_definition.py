"""Objects of a newer definition, without the fields that this version of the operator does not know.

An upgrade replaces the definitions first and the operator seconds later, and somebody may roll back the operator alone.
A definition adds new fields with their defaults to every stored object, so all objects then have fields that the older
operator must not refuse: nobody has changed them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from spotune.custom_resource.status import Condition, StatusSection
from spotune.errors import JobError
from spotune.job_file.problems import dotted
from spotune.job_file.yaml_file import Document
from spotune_operator.kube.conditions import is_true

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)
Status = TypeVar("Status", bound=StatusSection)


class RunningStatus(Protocol):
    """The status of a job or of a service."""

    @property
    def observed_generation(self) -> int:
        """``metadata.generation`` of the last reconcile."""

    @property
    def pinned(self) -> object | None:
        """Its pin."""

    @property
    def conditions(self) -> Sequence[Condition]:
        """Its conditions."""


def runs_as_reconciled(status: RunningStatus, generation: int) -> bool:
    """Whether the operator has reconciled an object as it is: then only the definition can have added fields.

    A refused object is observed, too, but its condition ``Stalled`` is true.
    """
    is_observed = status.observed_generation == generation and not is_true(status.conditions, "Stalled")
    return status.pinned is not None and is_observed


def parse_known(
    model: type[Model], parse: Callable[[Document], Model], body: Mapping[str, Any], *, unchanged: bool
) -> tuple[Model, JobError | None]:
    """An object, if need be without fields that this version does not know.

    Args:
        model: Model of the object.
        parse: Parses and checks it.
        body: The object of the API server.
        unchanged: Whether it ``runs_as_reconciled``.

    Returns:
        The object, and the error that it would have with the unknown fields; None: it has none. The caller raises it if
        the object without them asks for other pods.

    Raises:
        JobError: The object is invalid.
    """
    try:
        return parse(Document(content=dict(body))), None
    except JobError as error:
        unknown = _unknown_fields(model, body) if unchanged else []
        if not unknown:
            raise
        known = parse(Document(content=_without(body, unknown)))
        names = ", ".join(dotted(path) for path in unknown)
        logger.warning("ignoring %s: the definition is newer than this operator, upgrade it", names)
        return known, error


def parse_status(model: type[Status], content: Mapping[str, Any]) -> Status:
    """The status of an object without the fields that this version cannot parse: the pin stays."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        invalid = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        logger.warning("leaving out %s of a status of another version: %s", ", ".join(sorted(invalid)), error)
        return model.model_validate({name: value for name, value in content.items() if name not in invalid})


def _unknown_fields(model: type[BaseModel], body: Mapping[str, Any]) -> list[tuple[str | int, ...]]:
    try:
        model.model_validate(body, by_alias=True, by_name=False)
    except ValidationError as error:
        return [details["loc"] for details in error.errors() if details["type"] == "extra_forbidden"]
    return []


def _without(body: Mapping[str, Any], paths: list[tuple[str | int, ...]]) -> dict[str, Any]:
    reduced = deepcopy(dict(body))
    for *parents, name in paths:
        section: Any = reduced
        for parent in parents:
            section = section[parent]
        del section[name]
    return reduced
