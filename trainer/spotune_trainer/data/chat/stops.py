"""The token at which the model stops at the end of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from spotune.prompting.template import RowError
from spotune_trainer.data.chat.messages import Message
from spotune_trainer.data.chat.rendered import render_chat
from spotune_trainer.data.chat.template import ChatTemplate

_USER: Message = {"role": "user", "content": "?"}
_CHAT: Sequence[Message] = (_USER, {"role": "assistant", "content": "!"}, _USER)


class StopTokens:
    """Finds the tokens at which the model stops.

    A template writes a closing token after an answer, such as ``<|im_end|>``, or it writes none, and the model stops at
    the token of the next role (GLM). Which of these it does shows in a chat of one answer without tool calls. After
    calls a template may write another special token (``<|call|>`` of gpt-oss). Tokens that are not special do not end
    an answer: many tokenizers have ``</tool_call>`` as a token.

    Args:
        template: The chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def closes(self, answer: str) -> bool:
        """Whether an answer ends with a token that closes answers without calls, or with the end-of-text token."""
        tokens = tuple(token for token in (*(self._closing or ()), self._template.eos_token) if token)
        return bool(tokens) and answer.endswith(tokens)

    def is_complete(self, answer: str) -> bool:
        """Whether an answer ends with a token at which the model stops."""
        return self.closes(answer) or (self._closing != () and answer.endswith(tuple(self._template.special_tokens)))

    def find(self, text: str, start: int, end: int) -> int:
        """The end of the answer ``text[start:end]`` with the token at which the model stops.

        An answer without such a token ends with the token that begins the next message. If there is none either,
        tokenization adds the end-of-text token.
        """
        answer = text[start:end].rstrip()
        if self.is_complete(answer):
            return start + len(answer)
        following = text[end:].lstrip()
        tokens = self._template.added_tokens if self._closing == () else self._template.special_tokens
        token = next((token for token in tokens if following.startswith(token)), "")
        return len(text) - len(following) + len(token) if token else end

    def split_eos(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """The end of an answer before whitespace and the end-of-text token at its end, and the start of that token.

        Some templates end a chat with that token, after whitespace (Phi-3). Both are ``stop`` for other answers.
        """
        eos_token = self._template.eos_token
        if eos_token and text.endswith(eos_token, start, stop):
            before = text[start : stop - len(eos_token)]
            answer = before.rstrip()
            if answer != before and self._closing and answer.endswith(self._closing):
                return start + len(answer), stop - len(eos_token)
        return stop, stop

    @cached_property
    def _closing(self) -> tuple[str, ...] | None:
        """The tokens that close an answer without calls, at the end of a chat and before a question.

        None if the template renders no such chat.
        """
        try:
            asked, answered, continued = (render_chat(self._template, _CHAT[:size], ()).whole for size in (1, 2, 3))
        except RowError:
            return None
        question, answer = asked.last_position(0), continued.last_position(1)
        last, next_question = answered.last_position(1), continued.last_position(2)
        if question is None or answer is None or last is None or next_question is None:
            return None
        closing = [self._first_token(answered.text[last:])]
        between = continued.text[answer : next_question - 1].lstrip()
        if not self._begins_chat(between, asked.text[: question - 1]):
            closing.append(self._first_token(between))
        return tuple(dict.fromkeys(token for token in closing if token))

    def _begins_chat(self, between: str, beginning: str) -> bool:
        """Whether what is between an answer and a question also begins a chat: then it is the question's role alone.

        A chat may begin with a system message of the template, after which a role follows as after an answer.
        """
        if not beginning.endswith(between):
            return False
        tokens = _count(between, self._template.added_tokens)
        return tokens <= 1 or not _without(beginning.removesuffix(between), self._template.added_tokens).strip()

    def _first_token(self, text: str) -> str:
        following = text.lstrip()
        return next((token for token in self._template.added_tokens if following.startswith(token)), "")


def _without(text: str, tokens: Sequence[str]) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text


def _count(text: str, tokens: Sequence[str]) -> int:
    """How many of ``tokens``, which are sorted from long to short, are in a text."""
    found = 0
    for token in tokens:
        found += text.count(token)
        text = text.replace(token, "")
    return found
