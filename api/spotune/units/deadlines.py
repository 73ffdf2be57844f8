"""Deadlines (``2027-01-31T18:00:00+01:00``, ``36h``) in job files."""

import re
from datetime import datetime
from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .durations import Duration
from .text import CheckedText

_MAX_CHARACTERS = 64


class Deadline(CheckedText):
    """A point in time by RFC 3339, or a duration from the creation of the job.

    A time without an offset from UTC is invalid: it would mean another moment on each machine.

    Raises:
        ValueError: The text is neither.
    """

    __slots__ = ()

    _TIME: ClassVar[str] = (
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"
    )
    PATTERN: ClassVar[str] = rf"^({_TIME}|{Duration.PATTERN.strip('^$')})$"
    EXPECTED: ClassVar[str] = (
        "a time with its offset such as 2027-01-31T18:00:00Z, or a duration from the creation such as 36h"
    )

    def __new__(cls, text: str) -> Self:
        """Validate the text."""
        deadline = super().__new__(cls, text)
        if deadline.is_time:
            datetime.fromisoformat(text)  # raises for a day or hour that does not exist
        return deadline

    @property
    def is_time(self) -> bool:
        """Whether it is a point in time."""
        return "T" in self

    def at(self, created: float) -> float:
        """The deadline as Unix time.

        Args:
            created: Unix time of the job's creation.
        """
        return datetime.fromisoformat(self).timestamp() if self.is_time else created + Duration(self).seconds

    def problem(self, created: float) -> str:
        """Why a job that is created at this Unix time cannot have this deadline, and the remedy; empty if it can."""
        if self.at(created) > created:
            return ""
        if not self.is_time:
            return f"{self} leaves no time: give a duration longer than 0s"
        return f"{self} is in the past: give a later time, or a duration from the creation such as 36h"

    @classmethod
    def _to_text(cls, value: Any) -> Any:
        """Accept what YAML reads as a time, as `kubectl` does."""
        return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value

    @classmethod
    def _validate(cls, value: Any) -> Self:
        text = cls._to_text(value)
        try:
            if isinstance(text, str) and re.fullmatch(cls.PATTERN, text):
                return cls(text)
        except ValueError:
            text = None  # a day or hour that does not exist
        return super()._validate(None)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD; the API server checks by CEL that the day and hour exist."""
        exists = "!self.contains('T') || timestamp(self) > timestamp('1970-01-01T00:00:00Z')"
        rules = [
            {"rule": exists, "message": f"expected {cls.EXPECTED}"},
            {"rule": "self.matches('[1-9]')", "message": "must be longer than 0s"},
        ]
        bounds = {"pattern": cls.PATTERN, "maxLength": _MAX_CHARACTERS}
        return {"type": "string", **bounds, "x-kubernetes-validations": rules}
