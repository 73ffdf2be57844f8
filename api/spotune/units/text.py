"""Base class for validated strings in a job file that keep the user's spelling."""

import re
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class CheckedText(str):
    """A string that matches ``PATTERN`` and is written back unchanged.

    Raises:
        ValueError: The string does not match; the message contains ``EXPECTED``.
    """

    __slots__ = ()

    PATTERN: ClassVar[str]
    EXPECTED: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        """Validate the text."""
        if not re.fullmatch(cls.PATTERN, text):
            raise ValueError(f"{text!r} is not {cls.EXPECTED}")
        return super().__new__(cls, text)

    @classmethod
    def _to_text(cls, value: Any) -> Any:
        """Convert a value from a file to a string. Subclasses may accept more than strings."""
        return value

    @classmethod
    def _validate(cls, value: Any) -> Self:
        text = cls._to_text(value)
        if isinstance(text, str) and re.fullmatch(cls.PATTERN, text):
            return cls(text)
        raise PydanticCustomError("expected", "expected {expected}", {"expected": cls.EXPECTED})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate values from a file, and serialise as a string."""
        as_text = core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema())
        return core_schema.no_info_plain_validator_function(cls._validate, serialization=as_text)
