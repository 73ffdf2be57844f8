"""A chat as text, and the spans of it that the model is trained to generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from spotune.prompting.template import RowError
from spotune_trainer.data.chat.messages import Chat, Message, content_text, has_content
from spotune_trainer.data.chat.rendered import RenderedChat, render_chat
from spotune_trainer.data.chat.stops import StopTokens
from spotune_trainer.data.chat.template import ChatTemplate, TemplateRefusalError
from spotune_trainer.data.chat.turns import TurnError, TurnFinder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last", "all"]
TurnOutcome = Literal["trained", "flagged", "earlier", "empty", "refused", "notRendered", "notPlaced"]
"""What becomes of an assistant turn: it is trained on, or left out because its message is flagged, because only the
last turn is asked for, because it says nothing, or because the template refuses the chat, does not render the turn, or
does not let it be told from other text."""


@dataclass(frozen=True)
class TrainedSpan:
    """A span ``[start, end)`` of a rendered chat, in characters, that the model is trained to generate.

    An empty span at the end of the chat is the end-of-text token, which tokenization adds there.

    Attributes:
        start: First character.
        end: Character after the last one.
        turn: Index of the message that it belongs to; None for text of all messages.
    """

    start: int
    end: int
    turn: int | None


@dataclass(frozen=True)
class TrainedChat:
    """A rendered chat and what of it is trained on.

    Attributes:
        text: The rendered chat.
        spans: What is trained on, in order, without overlaps.
        outcomes: For each assistant message, by its index, what becomes of it.
        problems: For each turn that is skipped, the reason as a sentence.
        reasoning_removed: Trained turns whose reasoning the template removes.
        answer: Content of the last turn that is trained on, or, if it has none, its text without special tokens.
    """

    text: str
    spans: tuple[TrainedSpan, ...]
    outcomes: Mapping[int, TurnOutcome]
    problems: tuple[str, ...] = ()
    reasoning_removed: int = 0
    answer: str = ""


@dataclass
class _Draft:
    spans: list[TrainedSpan] = field(default_factory=list)
    outcomes: dict[int, TurnOutcome] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reasoning_removed: int = 0


class ChatRenderer:
    """Renders chats with the tokenizer's chat template.

    Args:
        tokenizer: Has the chat template.
        train_on: Every assistant turn, only the last one, or all text.
        trailing_whitespace: Also train on whitespace after the token that ends a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn = "assistant", trailing_whitespace: bool = False
    ) -> None:
        self._template = ChatTemplate(tokenizer)
        self._stops = StopTokens(self._template)
        self._train_on = train_on
        self._trailing_whitespace = trailing_whitespace

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the template: generation marks that cover text of the prompt."""
        question: Message = {"role": "user", "content": "?"}
        try:
            if not self._template.has_generation_segments(()):
                return ()
            messages = render_chat(self._template, [question, {"role": "assistant", "content": "!"}], ()).messages
            prompt = self._template.render(messages[:1], (), generation=True)
            text, segments = self._template.generation_segments(messages, ())
        except RowError:
            return ()
        start = min((start for start, _ in segments), default=len(text))
        shorter = min(len(prompt), len(text))
        same = next((place for place in range(shorter) if prompt[place] != text[place]), shorter)
        if start >= same:
            return ()
        warning = (
            f"the generation marks of {self._template.name} cover {text[start:same]!r}, which the prompt already has: "
            "the model also learns to write it. Move the marks behind it"
        )
        return (warning,)

    def render(self, chat: Chat) -> TrainedChat:
        """The whole chat, and what of it is trained on. If the template refuses the chat, its text is empty.

        Raises:
            RowError: A text has characters that serve as markers, or all answers to be learned are empty.
        """
        draft = _Draft()
        turns = self._choose_turns(chat, draft)
        try:
            rendered = render_chat(self._template, chat.messages, chat.tools)
            if self._train_on == "all":
                self._find_all_text(chat, rendered, draft)
            else:
                self._find_turns(chat, rendered, turns, draft)
        except TemplateRefusalError as error:
            outcomes: dict[int, TurnOutcome] = dict.fromkeys(chat.assistant_turns, "refused")
            return TrainedChat("", (), outcomes, (str(error),))
        return TrainedChat(
            rendered.whole.text,
            tuple(draft.spans),
            dict(sorted(draft.outcomes.items())),
            tuple(draft.problems),
            draft.reasoning_removed,
            self._last_answer(rendered, draft),
        )

    def _choose_turns(self, chat: Chat, draft: _Draft) -> list[int]:
        """The turns that the job asks for. Others get their outcome.

        Raises:
            RowError: All of them are empty.
        """
        turns = chat.assistant_turns
        for turn in turns:
            if chat.trained[turn] is False:
                draft.outcomes[turn] = "flagged"
            elif self._train_on == "last" and turn != turns[-1]:
                draft.outcomes[turn] = "earlier"
        chosen = [turn for turn in turns if turn not in draft.outcomes]
        empty = [turn for turn in chosen if self._train_on != "all" and not has_content(chat.messages[turn])]
        if empty and len(empty) == len(chosen):
            raise RowError(
                f"message {chosen[-1] + 1} is an empty answer, and no other is to be learned: remove the row"
            )
        draft.outcomes |= dict.fromkeys(empty, "empty")
        draft.problems += [
            f"message {turn + 1} is an empty answer, of which only the end could be learned" for turn in empty
        ]
        return [turn for turn in chosen if turn not in empty]

    def _last_answer(self, rendered: RenderedChat, draft: _Draft) -> str:
        turn = max((turn for turn, outcome in draft.outcomes.items() if outcome == "trained"), default=None)
        if turn is None:
            return ""
        text = "".join(rendered.whole.text[span.start : span.end] for span in draft.spans if span.turn == turn)
        for token in self._template.special_tokens:
            text = text.replace(token, "")
        return content_text(rendered.messages[turn]) or text.strip()

    def _find_turns(self, chat: Chat, rendered: RenderedChat, turns: list[int], draft: _Draft) -> None:
        finder = TurnFinder(self._template, rendered, chat.tools)
        text = rendered.whole.text
        segments = None
        if turns and self._template.has_generation_segments(chat.tools):
            marked_text, segments = self._template.generation_segments(rendered.messages, chat.tools)
            if marked_text != text:
                segments = None
        for turn in turns:
            try:
                spans = [finder.find(turn)] if segments is None else self._find_marked(finder, turn, text, segments)
            except TurnError as error:
                draft.outcomes[turn] = error.reason
                draft.problems.append(str(error))
                continue
            draft.outcomes[turn] = "trained"
            draft.reasoning_removed += finder.reasoning_is_removed(turn, "".join(text[a:b] for a, b in spans))
            draft.spans += self._finish(text, spans, turn)

    def _find_marked(
        self, finder: TurnFinder, turn: int, text: str, segments: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The generation marks of an answer. They may leave out the token that ends it."""
        spans = finder.find_marked(turn, segments)
        start, end = spans[-1]
        if not self._stops.closes(text[start:end].rstrip()):
            spans[-1] = (start, finder.extend_by_tokens(turn, start, end))
        return spans

    def _find_all_text(self, chat: Chat, rendered: RenderedChat, draft: _Draft) -> None:
        """All text but the turns that are flagged. Without their places, nothing can be trained on."""
        finder = TurnFinder(self._template, rendered, chat.tools)
        flagged = list(draft.outcomes)
        trained = [turn for turn in chat.assistant_turns if turn not in flagged]
        try:
            for turn in trained:
                finder.check_rendered(turn)
                finder.check_text(turn, rendered.whole.text)
            left_out = [finder.find(turn) for turn in flagged]
        except TurnError as error:
            draft.outcomes |= dict.fromkeys(trained, error.reason)
            draft.problems.append(str(error))
            return
        draft.outcomes |= dict.fromkeys(trained, "trained")
        stops = [*left_out, (len(rendered.whole.text),) * 2]
        starts = [0, *(end for _, end in left_out)]
        draft.spans = [
            TrainedSpan(start, stop, None) for start, (stop, _) in zip(starts, stops, strict=True) if start < stop
        ]

    def _finish(self, text: str, spans: list[tuple[int, int]], turn: int) -> Iterator[TrainedSpan]:
        """The spans of a turn, joined, with the last one up to the token that ends the turn."""
        joined = spans[:1]
        for start, end in spans[1:]:
            if text[joined[-1][1] : start].strip():
                joined.append((start, end))
            else:
                joined[-1] = (joined[-1][0], end)
        for start, end in joined[:-1]:
            yield TrainedSpan(start, end, turn)
        yield from self._last_spans(text, *joined[-1], turn)

    def _last_spans(self, text: str, start: int, end: int, turn: int) -> Iterator[TrainedSpan]:
        """The span of a turn up to the token that ends it, and the end-of-text token if another one ends the turn.

        Generation may stop only at the end-of-text token, so the last turn has to get there. Whitespace between these
        tokens is the template's, not the model's.
        """
        stop = self._stops.find(text, start, end)
        if self._trailing_whitespace:
            yield TrainedSpan(start, max(stop, end), turn)
            return
        answer_stop, eos_start = self._stops.split_eos(text, start, stop)
        yield TrainedSpan(start, answer_stop, turn)
        if answer_stop < eos_start:
            yield TrainedSpan(eos_start, stop, turn)
        elif stop < end == len(text) and self._template.eos_token not in text[start:stop]:
            yield TrainedSpan(end, end, turn)
