"""Kubernetes quantities (``500m`` CPUs, ``200Gi`` bytes) in job files."""

import re
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .text import CheckedText


class Quantity(CheckedText):
    """An amount such as ``8``, ``500m`` or ``200Gi``; ``value`` is the number.

    See https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.

    Raises:
        ValueError: The text is not a quantity.
    """

    __slots__ = ()

    FACTORS: ClassVar[dict[str, float]] = (
        {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
        | {unit: 1000.0**power for power, unit in enumerate("MGTPE", start=2)}
        | {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", start=1)}
    )
    PATTERN: ClassVar[str] = r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)((?:[eE][+-]?[0-9]+)|n|u|m|k|[KMGTPE]i|[MGTPE])?$"
    EXPECTED: ClassVar[str] = "a Kubernetes quantity such as 8, 500m, 64Gi or 1.5Ti (Gi is 1024^3, G is 1000^3; no B)"

    @property
    def value(self) -> float:
        """The amount in the resource's own unit: CPUs, bytes or devices."""
        match = re.fullmatch(self.PATTERN, self)
        assert match is not None, "checked at construction"
        number, suffix = match.group(1), match.group(2) or ""
        return float(number) * self.FACTORS[suffix] if suffix in self.FACTORS else float(number + suffix)

    @classmethod
    def _to_text(cls, value: Any) -> Any:
        """Accept numbers as well, as Kubernetes does."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD, in the same form as Kubernetes' own quantities."""
        kinds = [{"type": "integer"}, {"type": "string"}]
        return {"anyOf": kinds, "minimum": 0, "pattern": cls.PATTERN, "x-kubernetes-int-or-string": True}
