"""Errors have OpenAI's format and name the wrong field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from spotune_serve.protocol.chat import ChatRequest
from spotune_serve.protocol.errors import ApiError, context_length_error, validation_error


def error_of(body: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return validation_error(errors, body)


def test_the_body_has_four_fields() -> None:
    error = ApiError(404, "There is none.", param="model", code="model_not_found")
    fields = {"message": "There is none.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert error.body() == {"error": fields}
    assert ApiError(503, "Later.").body()["error"]["type"] == "server_error"


def test_a_long_prompt_names_both_numbers() -> None:
    error = context_length_error(100, 123, "prompt")
    assert "123" in error.message
    assert "100" in error.message


@pytest.mark.parametrize("body", [[1], "text", None])
def test_a_body_that_is_no_object_is_said_to_be_none(body: Any) -> None:
    assert error_of(body).message == "The body must be a JSON object."


def test_the_type_that_fits_best_is_explained() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": 3}]}
    error = error_of({"model": "m", "messages": [message]})
    assert error.param == "messages.0.content.0.text"
    assert error.message == "messages.0.content.0.text: Input should be a valid string"


def test_of_several_wrong_fields_the_first_is_named() -> None:
    error = error_of({"messages": [], "temperature": "x"})
    assert (error.param, error.code) == ("model", "missing_required_parameter")


def test_our_own_checks_are_quoted_without_pydantics_prefix() -> None:
    message = {"role": "user", "content": "x"}
    error = error_of({"model": "m", "messages": [message], "top_logprobs": 3})
    assert error.message == "top_logprobs: top_logprobs needs logprobs: true"
