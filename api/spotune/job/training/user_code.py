"""Code of the user that trains in place of spotune's training loop: a function, or a command."""

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from spotune.custom_resource.base import with_cel_rules
from spotune.job.training.metric import ENTRY_POINT

_EXPECTED_FUNCTION: Final = "a function as package.module:function"


def _check_function(function: str) -> str:
    if function and not re.fullmatch(ENTRY_POINT, function):
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _EXPECTED_FUNCTION})
    return function


TrainingFunction = Annotated[
    str,
    AfterValidator(_check_function),
    with_cel_rules((f"self.matches(r'^({ENTRY_POINT})?$')", f"expected {_EXPECTED_FUNCTION}"), max_length=200),
]
UserConfig = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]

MAX_ARGUMENTS: Final = 256
MAX_ARGUMENT_CHARACTERS: Final = 4096
Argument = Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]
Command = Annotated[list[Argument], Field(max_length=MAX_ARGUMENTS)]
