"""Durations (``90s``, ``1h30m``) in job files."""

import re
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .text import CheckedText


class Duration(CheckedText):
    """A length of time such as ``300s``, ``5m``, ``1h30m`` or ``500ms``; ``seconds`` is its value.

    A number without a unit is invalid.

    Raises:
        ValueError: The text is not a duration.
    """

    __slots__ = ()

    UNIT_SECONDS: ClassVar[dict[str, float]] = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    PATTERN: ClassVar[str] = r"^([0-9]+(\.[0-9]+)?(ms|d|h|m|s))+$"
    EXPECTED: ClassVar[str] = "a duration such as 30s, 5m, 1h30m or 500ms"

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        parts = re.findall(r"([0-9.]+)(ms|d|h|m|s)", self)
        return sum(float(number) * self.UNIT_SECONDS[unit] for number, unit in parts)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD: a string with a pattern."""
        return {"type": "string", "pattern": cls.PATTERN}
