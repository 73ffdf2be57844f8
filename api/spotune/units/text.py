"""Values of a job file that are numbers with units, and stay the text that the user wrote."""

import re
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class CheckedText(str):
    """A text that matches ``PATTERN``, so that a job file survives a round trip unchanged.

    Raises:
        ValueError: The text is not ``EXPECTED``.
    """

    __slots__ = ()

    PATTERN: ClassVar[str]
    EXPECTED: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        """Checks the text."""
        if not re.fullmatch(cls.PATTERN, text):
            raise ValueError(f"{text!r} is not {cls.EXPECTED}")
        return super().__new__(cls, text)

    @classmethod
    def _text_of(cls, value: Any) -> Any:
        """The text of a value in a file; only texts count unless a kind of value says otherwise."""
        return value

    @classmethod
    def _validate(cls, value: Any) -> Self:
        text = cls._text_of(value)
        if isinstance(text, str) and re.fullmatch(cls.PATTERN, text):
            return cls(text)
        raise PydanticCustomError("expected", "expected {expected}", {"expected": cls.EXPECTED})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validates what a file holds, serialises as a string."""
        as_text = core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema())
        return core_schema.no_info_plain_validator_function(cls._validate, serialization=as_text)
