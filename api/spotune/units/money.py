"""Amounts of money and prices (``120 USD``) in job files."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from .text import CheckedText


class Price(CheckedText):
    """A price with its currency by ISO 4217, such as ``2.10 USD``. A number without a currency is invalid.

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


class Money(Price):
    """An amount above 0, such as ``120 USD`` or ``99.50 EUR``.

    Raises:
        ValueError: The text is not an amount above 0 with a currency.
    """

    __slots__ = ()

    PATTERN: ClassVar[str] = r"^(0\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?) [A-Z]{3}$"
    EXPECTED: ClassVar[str] = "an amount above 0 with its currency, such as 120 USD or 99.50 EUR"
