"""Amounts of money (``120 USD``) in job files."""

from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .text import CheckedText


class Money(CheckedText):
    """An amount with its currency by ISO 4217, such as ``120 USD`` or ``99.50 EUR``.

    Raises:
        ValueError: The text is not an amount above 0 with a currency.
    """

    __slots__ = ()

    PATTERN: ClassVar[str] = r"^(0\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?) [A-Z]{3}$"
    EXPECTED: ClassVar[str] = "an amount above 0 with its currency, such as 120 USD or 99.50 EUR"

    @property
    def amount(self) -> float:
        """The number."""
        return float(self.split(" ")[0])

    @property
    def currency(self) -> str:
        """The currency, three letters."""
        return self.split(" ")[1]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD: a string with a pattern."""
        return {"type": "string", "pattern": cls.PATTERN}
