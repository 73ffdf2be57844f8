"""Finds what the assistant says in a rendered chat: where each answer begins and where it ends.

An answer begins where the prompt ends that the model gets at inference: the messages before it, rendered with the
generation prompt. It ends where the same messages with the answer end. Many templates render a message differently once
more messages follow (Qwen3 removes earlier reasoning, gpt-oss ends earlier answers with another token), so the rendered
beginning of a chat is often not the beginning of the rendered chat. Then only the text between two markers is compared:
from the last message before the answer to the answer, and from the answer to the next message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from spotune.prompting.template import RowError
from spotune_trainer.data.chat.markers import Field, Located
from spotune_trainer.data.chat.messages import Message, content_text, has_text_of
from spotune_trainer.data.chat.reasoning import split_reasoning
from spotune_trainer.data.chat.rendered import RenderedChat
from spotune_trainer.data.chat.template import ChatTemplate, TemplateRefusalError

_LONGEST_TAG = 100  # characters
_OPEN_TAG = re.compile(r"[<\[][^<>\[\]]*\Z|\w+\Z")

Reason = Literal["notRendered", "notPlaced"]


class TurnError(RowError):
    """An answer that cannot be trained on.

    Attributes:
        reason: ``notRendered``: the template leaves it, or what it answers, out. ``notPlaced``: it cannot be separated
            from the text around it.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class TurnFinder:
    """Finds the answers of one rendered chat.

    Args:
        template: The chat template.
        chat: The rendered chat.
        tools: Passed to the template.
    """

    def __init__(self, template: ChatTemplate, chat: RenderedChat, tools: Sequence[dict[str, Any]]) -> None:
        self._template = template
        self._chat = chat
        self._tools = tools
        self._whole = chat.whole
        self._marked = chat.marked.messages

    def find(self, turn: int) -> tuple[int, int]:
        """Where the answer ``turn`` begins and ends in the rendered chat, in characters.

        It ends with what the template writes to end it, such as ``<|im_end|>`` and a line break.

        Raises:
            TurnError: The template does not render it, or it cannot be placed.
            TemplateRefusalError: The template raises an error for the beginning of the chat.
        """
        self.check_rendered(turn)
        start = self._find_start(turn)
        # After the result of a tool, DiffusionGemma writes the role into the chat, but not into the prompt.
        start += len(self._role) if self._role and self._whole.text.startswith(self._role, start) else 0
        end = self._find_stop(turn, start)
        self._check_markers(turn, [(start, end)])
        self.check_text(turn, self._whole.text[start:end])
        return start, end

    def find_marked(self, turn: int, segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the template's generation marks that belong to the answer ``turn``.

        Raises:
            TurnError: The template does not render the answer, or not within marks.
        """
        self.check_rendered(turn)
        visible = [(start, end) for start, end in segments if self._whole.text[start:end].strip()]
        owned = [segment for segment, owner in zip(visible, self._owners(visible), strict=True) if owner == turn]
        if not owned:
            raise TurnError("notPlaced", f"{self._template.name} has {_place(turn)} outside its generation marks")
        self._check_markers(turn, owned)
        self.check_text(turn, "".join(self._whole.text[start:end] for start, end in owned))
        return owned

    def extend_by_tokens(self, turn: int, start: int, end: int) -> int:
        """The end of the answer ``turn`` with the tokens that its template writes directly after its marks.

        A mark may end before the token that ends the turn, such as ``<|tool_response>`` after a call.

        Args:
            turn: Index of the message.
            start: Beginning of its last mark.
            end: End of its last mark.
        """
        try:
            stop = self._find_stop(turn, start)
        except (TurnError, TemplateRefusalError):
            return end
        added = self._whole.text[end:stop]
        for token in self._template.added_tokens:
            added = added.replace(token, "")
        return max(stop, end) if not added.strip() else end

    def check_rendered(self, turn: int) -> None:
        """Check that the template renders an answer and all before it, and reasoning if the answer is the last one.

        Earlier reasoning is no context: templates remove it on purpose, also at inference.

        Raises:
            TurnError: It does not.
        """
        messages = self._chat.messages
        for field in sorted(self._chat.lost, key=lambda field: (field.message, field.kind, field.call)):
            is_own = field.message == turn and (field.kind != "reasoning" or self._is_last(turn))
            is_call = field.kind in ("name", "arguments")
            is_reasoning = field.kind == "reasoning" and messages[field.message]["role"] == "assistant"
            is_context = field.message < turn and not is_reasoning
            if is_own or is_context:
                name = f"tool call {field.call + 1}" if is_call else field.kind
                place = f"{_place(field.message)} ({messages[field.message]['role']})"
                raise TurnError("notRendered", f"{self._template.name} does not render the {name} of {place}")
        for tool in self._tools:
            name = str(tool.get("function", tool).get("name", ""))
            if name not in self._whole.text:
                raise TurnError("notRendered", f"{self._template.name} does not render the tool {name!r}")

    def check_text(self, turn: int, text: str) -> None:
        """Check that ``text`` has the whole content of an answer; reasoning in it counts only in the last one.

        Raises:
            TurnError: It does not.
        """
        message = self._chat.messages[turn]
        if has_text_of(message, text):
            return
        reasoning, answer = split_reasoning(content_text(message).strip())
        if self._is_last(turn) and any(part.strip() not in text for part in reasoning):
            raise TurnError(
                "notRendered", f"{self._template.name} does not render the reasoning in the content of {_place(turn)}"
            )
        if not reasoning or answer.strip() not in text:
            raise TurnError("notRendered", f"{self._template.name} does not render the whole content of {_place(turn)}")

    def reasoning_is_removed(self, turn: int, text: str) -> bool:
        """Whether the template removed reasoning from an answer, which it rendered as ``text``."""
        if Field(turn, "reasoning") in self._chat.lost:
            return True
        message = self._chat.messages[turn]
        return not has_text_of(message, text) and bool(split_reasoning(content_text(message))[0])

    def _is_last(self, turn: int) -> bool:
        """Whether no other answer follows."""
        return not any(message["role"] == "assistant" for message in self._chat.messages[turn + 1 :])

    def _find_start(self, turn: int) -> int:
        text = self._whole.text
        if turn == 0:
            return self._find_role(turn, 0)
        prompt = self._locate(turn, generation=True)
        if text.startswith(prompt.text):
            return len(prompt.text)
        before, here = self._common_anchor(turn, prompt)
        expected = prompt.text[before:]
        matched = _common_length(expected, text[here:])
        if matched < len(expected):  # the prompt opens more than the answer has, such as <think>
            role = self._generation_prompt(turn)
            of_prompt = matched - (len(expected) - len(role))
            if of_prompt <= 0 or not role[:of_prompt].strip():
                # The template ends the message before it in another way, such as with another line break.
                return self._find_role(turn, here, role)
        return here + matched

    def _find_role(self, turn: int, position: int, role: str = "") -> int:
        """The end of a generation prompt between a position and the first marker of an answer."""
        role, until = role or self._role, self._whole.first_position(turn)
        if not role.strip() or until is None or self._whole.text.count(role, position, until) != 1:
            raise self._not_placed(turn, "it does not follow the generation prompt")
        return self._whole.text.index(role, position) + len(role)

    def _generation_prompt(self, turn: int) -> str:
        """What the template writes to prompt for an answer after the messages before it."""
        if turn == 0:
            return self._role
        messages = self._chat.messages[:turn]
        prompt = self._template.render(messages, self._tools, generation=True)
        return prompt[_common_length(prompt, self._template.render(messages, self._tools)) :]

    @cached_property
    def _role(self) -> str:
        """What the template writes to prompt for an answer to a question; empty if it writes nothing or refuses."""
        question: Message = {"role": "user", "content": "?"}
        try:
            prompt = self._template.render([question], (), generation=True)
            return prompt[_common_length(prompt, self._template.render([question], ())) :]
        except TemplateRefusalError:
            return ""

    def _find_stop(self, turn: int, start: int) -> int:
        text = self._whole.text
        if turn == len(self._chat.messages) - 1:
            return self._find_last_stop(turn, start)
        until = self._locate(turn + 1, generation=False)
        if text.startswith(until.text):
            return len(until.text)
        here, there = self._whole.last_position(turn), until.last_position(turn)
        if here is None or there is None:
            raise self._not_placed(turn, "nothing in it can be found again in the chat")
        length = _matching_length(until.text[there:], text[here:])
        if length is not None:
            return here + length
        # Some templates end the last answer in another way than those before it.
        closing = self._closing(turn)
        if closing is not None and text.startswith(closing, here):
            return here + len(closing)
        raise self._not_placed(turn, "its end cannot be told from the next message")

    def _find_last_stop(self, turn: int, start: int) -> int:
        """The end of an answer that ends the chat; without what the template writes after the end of every chat."""
        text = self._whole.text
        here = self._whole.last_position(turn) or start
        remainder = text[here:]
        tokens = sum(remainder.count(token) for token in self._template.special_tokens)
        if tokens <= 1 and self._role:
            return len(text)
        # A template may write the beginning of another answer after every chat, asked for or not.
        user: Message = {"role": "user", "content": "?"}
        try:
            longer = self._chat.marked.locate(self._template.render([*self._marked, user], self._tools))
            common = _common_length(remainder, longer.text[longer.last_position(turn) or start :])
        except TemplateRefusalError:  # such as a question after a call
            common = len(remainder) if tokens <= 1 else 1
        if remainder[:common].strip() and remainder[common:].strip() not in ("", self._template.eos_token):
            raise self._not_placed(turn, "the template writes the beginning of another answer after it")
        closing = self._closing(turn)
        if closing and closing.strip() and remainder.startswith(closing):
            after = remainder[len(closing) :].strip()
            return here + len(closing) if after not in ("", self._template.eos_token) else len(text)
        return len(text)

    def _closing(self, turn: int) -> str | None:
        """What follows an answer's last marker if the assistant is to speak again; None if that cannot be told."""
        try:
            generation_prompt = self._generation_prompt(turn)
            until = self._locate(turn + 1, generation=True)
        except TemplateRefusalError:
            return None
        position = until.last_position(turn)
        if position is None or not generation_prompt or not until.text.endswith(generation_prompt):
            return None
        return until.text[position : -len(generation_prompt)]

    def _common_anchor(self, turn: int, prompt: Located) -> tuple[int, int]:
        """The last message before an answer with one position in the prompt and one in the whole chat: both."""
        for message in reversed(range(turn)):
            there, here = prompt.last_position(message), self._whole.last_position(message)
            if there is not None and here is not None:
                return there, here
        raise self._not_placed(turn, "nothing before it can be found in the chat")

    def _owners(self, segments: Sequence[tuple[int, int]]) -> list[int | None]:
        """For each generation mark, the answer that it belongs to.

        That is the answer with a field in it. A mark without fields, such as one of an end-of-text token, belongs to
        the answer of the mark before it.
        """
        turns = [index for index, message in enumerate(self._chat.messages) if message["role"] == "assistant"]
        owners: list[int | None] = []
        for number, (start, end) in enumerate(segments):
            found = {
                field.message
                for field, positions in self._whole.positions.items()
                if any(self._is_within(position, start, end) for position in positions)
            }
            if found.intersection(turns):
                owners.append(min(found.intersection(turns)))
            elif len(segments) == len(turns):  # one mark for each answer, also for those that say nothing
                owners.append(turns[number])
            else:
                owners.append(owners[-1] if owners else None)
        return owners

    @staticmethod
    def _is_within(position: int, start: int, end: int) -> bool:
        return start < position <= end

    def _check_markers(self, turn: int, spans: Sequence[tuple[int, int]]) -> None:
        """Check that all of the answer, and nothing of other messages, lies within its ranges."""
        for field, positions in self._whole.positions.items():
            inside = [any(self._is_within(position, start, end) for start, end in spans) for position in positions]
            if field.message == turn and not (inside[0] if field.kind == "name" else all(inside)):
                raise self._not_placed(turn, "the template renders parts of it elsewhere")
            if field.message != turn and any(inside):
                raise self._not_placed(turn, f"the template renders text of {_place(field.message)} within it")

    def _locate(self, stop: int, *, generation: bool) -> Located:
        return self._chat.marked.locate(self._template.render(self._marked[:stop], self._tools, generation=generation))

    def _not_placed(self, turn: int, why: str) -> TurnError:
        return TurnError(
            "notPlaced", f"{self._template.name} does not let {_place(turn)} be told from the text around it: {why}"
        )


def _common_length(text: str, other: str) -> int:
    """Length of what two texts begin with alike, up to a tag or word that the other does not have in full."""
    length, differs = 0, min(len(text), len(other)) + 1
    while differs - length > 1:
        middle = (length + differs) // 2
        length, differs = (middle, differs) if text[:middle] == other[:middle] else (length, middle)
    if length in (len(text), len(other)):
        return length
    nearby = max(0, length - _LONGEST_TAG)
    opened = _OPEN_TAG.search(text[nearby:length])
    return nearby + opened.start() if opened else length


def _matching_length(expected: str, text: str) -> int | None:
    """How much of ``text`` is ``expected``, apart from whitespace; None if it does not begin with it."""
    position = 0
    for character in expected:
        if not character.isspace():
            while text[position : position + 1].isspace():
                position += 1
            if text[position : position + 1] != character:
                return None
            position += 1
    return len(expected) if text.startswith(expected) else position


def _place(message: int) -> str:
    return f"message {message + 1}"
