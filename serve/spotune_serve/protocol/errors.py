"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_INVALID_REQUEST = "invalid_request_error"
_SERVER_ERROR = "server_error"
_FIRST_SERVER_STATUS = 500
_NO_OBJECT = ("model_type", "model_attributes_type")
"""Pydantic's errors of a value that is no JSON object where a model is expected."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the field that is wrong.
        code: OpenAI's name of the problem, such as `model_not_found`.
        headers: additional HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _SERVER_ERROR if self.status >= _FIRST_SERVER_STATUS else _INVALID_REQUEST
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def context_length_error(limit: int, length: int, param: str) -> ApiError:
    """The prompt is too long.

    Args:
        limit: maximum prompt length in tokens.
        length: the prompt's length in tokens.
        param: the field with the prompt.
    """
    message = f"The prompt has {length} tokens, but this model takes at most {limit}. Shorten the prompt."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """What pydantic found in a request body, as one error that names the first wrong field.

    Args:
        errors: pydantic's errors; locations start with "body".
        body: the request body.
    """
    # A value that may have several types has an error for each. The one that went deepest tells most.
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    paths = [_path(error, body) for error in same_field]
    param = max(paths, key=lambda path: len(path.split(".")))
    messages = [_message(error) for error, path in zip(same_field, paths, strict=True) if path == param]
    text = "; or: ".join(dict.fromkeys(messages))
    code = "missing_required_parameter" if errors[0]["type"] == "missing" else None
    return ApiError(400, f"{param}: {text}" if param else text, param=param or None, code=code)


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"The body is not valid JSON: {error.get('ctx', {}).get('error', '')}."
    if error["type"] in _NO_OBJECT and len(error["loc"]) == 1:
        return "The body must be a JSON object."
    if error["type"] == "missing":
        return "This field is required"
    return str(error["msg"]).removeprefix("Value error, ")


def _path(error: Mapping[str, Any], body: Any) -> str:
    """The wrong field, such as `messages.0.content`. Pydantic's names of union members are left out."""
    parts: list[str] = []
    value = body
    for part in error["loc"][1:]:
        if (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)
