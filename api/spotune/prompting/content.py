"""Content of chat messages as a list of text parts, in the forms that chat templates read.

Preparation and serving try the same forms in the same order, so a chat has the same text in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final


def rendering_errors() -> tuple[type[Exception], ...]:
    """Errors of a chat template that does not read the messages, at inference. Needs jinja2."""
    from jinja2 import TemplateError

    return (TemplateError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def simple_content(content: Any) -> Any:
    """Content that is a list of one text part as text; other content as it is."""
    return content[0]["text"] if isinstance(content, list) and len(content) == 1 else content


def with_content(messages: Sequence[Mapping[str, Any]], form: Callable[[Any], Any]) -> tuple[dict[str, Any], ...]:
    """Messages with their content in one of the forms of `CONTENT_FORMS`."""
    return tuple(
        {name: form(value) if name == "content" else value for name, value in message.items()} for message in messages
    )


def joined_content(content: Any) -> Any:
    """Text parts joined by line breaks; other content as it is."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def render_content(
    render: Callable[[list[dict[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    refusals: tuple[type[Exception], ...],
) -> str:
    """The messages as ``render`` writes them, in the first form of their content that it reads.

    Args:
        render: Renders a chat template.
        messages: The messages.
        refusals: Errors of ``render`` for messages that the template does not read. If it reads no form, that for
            content as text is raised.
    """
    refusal: Exception | None = None
    tried: list[list[dict[str, Any]]] = []
    for form in CONTENT_FORMS:
        try:
            changed = list(with_content(messages, form))
            if changed in tried:
                continue
            tried.append(changed)
            text = render(changed)
        except refusals as error:
            if refusal is None and (form is joined_content or not _has_lists(messages)):
                refusal = error
            continue
        if reads_parts(text, changed):
            return text
    assert refusal is not None, "content as text has no lists, so it was rendered or refused"
    raise refusal


def reads_parts(rendered: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template read the lists of parts in ``messages``.

    Others write a list as Python or JSON does, or leave parts out.

    Args:
        rendered: The messages as the template wrote them.
        messages: The messages.
    """
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) or not content:
            continue
        if repr(content) in rendered or json.dumps(content, ensure_ascii=False) in rendered:
            return False
        texts = [str(part.get("text", "")) for part in content if isinstance(part, Mapping)]
        if len(texts) > 1 and any(text.strip() not in rendered for text in texts):
            return False
    return True


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _has_lists(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def _as_one_part(content: Any) -> Any:
    return _as_parts(joined_content(content))


CONTENT_FORMS: Final = (simple_content, _as_parts, joined_content, _as_one_part)
"""Forms of content, in the order in which they are to be tried: as in the row, all of it as lists of parts, parts
joined by line breaks, and each text as one part. Without lists, the first is text and the second one part."""
