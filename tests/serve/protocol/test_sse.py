"""Bodies of a stream that are not serialized as a whole have the same bytes as if they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from spotune_serve.protocol.chat import AnswerMessage, ChatChunk, ChatChunkChoice, ChatLogprobs
from spotune_serve.protocol.completions import Completion, CompletionChoice
from spotune_serve.protocol.sse import TextBodies, json_of

MODEL = 'a "model" named <text>'


def completion(index: int, text: str) -> BaseModel:
    choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
    return Completion(id="cmpl-1", object="text_completion", created=5, model=MODEL, choices=[choice])


def chat(index: int, text: str) -> BaseModel:
    choice = ChatChunkChoice(
        index=index, delta=AnswerMessage(content=text), logprobs=ChatLogprobs(content=[]), finish_reason=None
    )
    return ChatChunk(
        id="chatcmpl-1", object="chat.completion.chunk", created=5, model=MODEL, choices=[choice], usage=None
    )


@pytest.mark.parametrize("body", [completion, chat])
@given(texts=st.lists(st.tuples(st.integers(0, 3), st.text() | st.just("<text>"))))
def test_only_the_text_is_serialized_for_each_body(
    body: Callable[[int, str], BaseModel], texts: list[tuple[int, str]]
) -> None:
    bodies = TextBodies(body)
    assert [bodies.json(index, text) for index, text in texts] == [json_of(body(index, text)) for index, text in texts]
