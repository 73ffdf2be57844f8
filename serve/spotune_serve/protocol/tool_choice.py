"""`tool_choice`: which tools an answer has to call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spotune_serve.protocol.response_format import MAX_SCHEMA_BYTES, check_schema

_FORMS = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


class ToolFunction(BaseModel):
    """The function of a tool. Every schema is enforced, whatever `strict` says."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = None

    @property
    def arguments_schema(self) -> str:
        """JSON schema of the arguments, an object. Without parameters it is empty, as OpenAI defines it."""
        parameters = {"additionalProperties": False} if self.parameters is None else self.parameters
        return json.dumps({"type": "object", **parameters})


def forced_functions(tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> list[ToolFunction]:
    """The functions of which the answer must call one; empty if it may be a text.

    Args:
        tools: of the request.
        tool_choice: of the request.

    Raises:
        ValueError: `tool_choice` has no known form, or there is no such tool.
    """
    if tool_choice in (None, "none", "auto"):
        return []
    name = None if tool_choice == "required" else _chosen_name(tool_choice)
    functions = [_function(number, tool) for number, tool in enumerate(tools)]
    found = [function for function in functions if name in (None, function.name)]
    if not found:
        names = ", ".join(function.name for function in functions) or "none"
        what = "asks for a call" if name is None else f"names the function {name!r}"
        raise ValueError(f"it {what}, and tools has: {names}. Add the function to tools")
    return found


def check_functions(functions: Sequence[ToolFunction]) -> None:
    """Refuse functions whose arguments cannot be enforced.

    Raises:
        ValueError: the schema of its parameters is not that of an object, is not supported, or too large.
    """
    for function in functions:
        if (function.parameters or {}).get("type", "object") != "object":
            raise ValueError(f"the parameters of {function.name!r} must have the type object")
        try:
            check_schema(function.arguments_schema)
        except ValueError as error:
            raise ValueError(f"parameters of {function.name!r}: {error}") from error
    if sum(len(function.arguments_schema.encode()) for function in functions) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the parameters of all tools are larger than {MAX_SCHEMA_BYTES} bytes: name one function")


def _chosen_name(tool_choice: Any) -> str:
    function = tool_choice.get("function") if tool_choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"it must be {_FORMS}")
    return name


def _function(number: int, tool: Mapping[str, Any]) -> ToolFunction:
    try:
        return ToolFunction.model_validate(tool.get("function"))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(("function", *map(str, problem["loc"])))
        raise ValueError(f"tools[{number}] must have a function with a name: {place}: {problem['msg']}") from error
