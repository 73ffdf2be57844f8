"""Prices with their currency (``2.10 USD``) in job files."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .text import CheckedText


class Price(CheckedText):
    """A price such as ``2.10 USD``: ``amount`` is its value, ``currency`` the code of ISO 4217.

    A number without a currency is invalid.

    Raises:
        ValueError: The text is not a price.
    """

    __slots__ = ()

    PATTERN: ClassVar[str] = r"^[0-9]{1,9}(\.[0-9]{1,6})? [A-Z]{3}$"
    EXPECTED: ClassVar[str] = "a price with its currency, such as 2.10 USD"

    @property
    def amount(self) -> float:
        """The number before the currency."""
        return float(self.partition(" ")[0])

    @property
    def currency(self) -> str:
        """Code of the currency: three capital letters."""
        return self.partition(" ")[2]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD: a string with a pattern."""
        return {"type": "string", "pattern": cls.PATTERN, "maxLength": 24}
