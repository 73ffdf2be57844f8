"""A whole rendered chat, with the place of each message in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.prompting.content import reads_parts
from spotune_trainer.data.chat.markers import Field, Located, MarkedMessages
from spotune_trainer.data.chat.messages import Message, content_text, has_text_of, message_variants
from spotune_trainer.data.chat.reasoning import split_reasoning
from spotune_trainer.data.chat.template import ChatTemplate, TemplateRefusalError


@dataclass(frozen=True)
class RenderedChat:
    """A whole rendered chat.

    Attributes:
        messages: The messages, in the form that the template renders.
        marked: The same with markers.
        whole: The rendered text, and where the markers are in it.
        lost: Fields that the template leaves out. Templates remove earlier reasoning on purpose, so it may be lost.
    """

    messages: Sequence[Message]
    marked: MarkedMessages
    whole: Located
    lost: frozenset[Field]


def render_chat(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> RenderedChat:
    """Render a chat, with its messages in the first form of which the template renders every field.

    If there is none, the form of which it renders most.

    Raises:
        TemplateRefusalError: The template renders no form.
    """
    best: RenderedChat | None = None
    refusals: dict[bool, list[TemplateRefusalError]] = {True: [], False: []}  # by whether content is in lists
    for variant in message_variants(messages):
        try:
            rendered = _render(template, variant, tools)
        except TemplateRefusalError as error:
            refusals[any(isinstance(message.get("content"), list) for message in variant)].append(error)
            continue
        if best is None or _losses(rendered) < _losses(best):
            best = rendered
        if not _losses(best):
            return best
    if best is None:
        has_null = any(message["content"] is None for message in messages)
        raise refusals[False][1 if has_null else 0]  # the first is about the missing content
    return best


def _losses(rendered: RenderedChat) -> int:
    return sum(field.kind != "reasoning" for field in rendered.lost)


def _render(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> RenderedChat:
    text = template.render(messages, tools)
    if not reads_parts(text, messages):
        raise TemplateRefusalError(f"{template.name} does not read lists of content parts")
    marked = MarkedMessages(messages)
    whole = marked.locate(template.render(marked.messages, tools))
    if whole.text != text:
        everything = set(range(len(messages)))
        changing = set()
        for index in everything:
            alone = MarkedMessages(messages, everything - {index})
            if alone.locate(template.render(alone.messages, tools)).text != text:
                changing.add(index)
        marked = MarkedMessages(messages, changing)
        whole = marked.locate(template.render(marked.messages, tools))
        if whole.text != text:
            raise TemplateRefusalError(f"{template.name} renders other text when messages differ by one character")
    return RenderedChat(messages, marked, whole, frozenset(_find_lost(messages, marked, whole)))


def _find_lost(messages: Sequence[Message], marked: MarkedMessages, whole: Located) -> Iterator[Field]:
    """Fields without their marker in the text, and fields without a marker that are not in the text either."""
    for field in marked.fields:
        if field not in whole.positions:
            yield field
    for index, message in enumerate(messages):
        content = Field(index, "content")
        if content not in marked.fields and not _has_content(whole.text, message):
            yield content
        for number, call in enumerate(message.get("tool_calls", ())):
            name = Field(index, "name", number)
            if name not in marked.fields and call["function"]["name"] not in whole.text:
                yield name
            if _has_repr(whole.text, call["function"]["arguments"]):
                yield Field(index, "arguments", number)


def _has_content(text: str, message: Message) -> bool:
    """Whether a rendered chat has the content of a message; of the assistant's at least what is no reasoning."""
    if has_text_of(message, text):
        return True
    return message["role"] == "assistant" and split_reasoning(content_text(message))[1].strip() in text


def _has_repr(text: str, value: Any) -> bool:
    """Whether a template wrote an object as Python does, instead of reading it or writing JSON."""
    return isinstance(value, dict) and len(value) > 0 and repr(value) in text
