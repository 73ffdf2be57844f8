"""From a raw row to tokens: templates over columns, plain text, and chat messages.

A row is rendered as segments of text, each with or without loss: a prompt carries none, what the model shall say does.
Prompts and completions are tokenised apart, as they are when the model answers, and what the model shall say ends with
the end-of-text token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from spotune_trainer.data.batches import NO_LOSS, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = frozenset({"input_ids", "labels", "lengths", "completion"})

TokenArray = npt.NDArray[np.int32]


class RowError(ValueError):
    """A row that cannot be made into text; the message says why, without saying where the row is."""


class Template:
    """Text with ``{column}`` in it; ``{{`` and ``}}`` stand for braces.

    Raises:
        ValueError: A brace is not closed or not opened.
    """

    _TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")

    def __init__(self, template: str) -> None:
        self._parts: list[tuple[str, str]] = []  # (literal text, column after it or "")
        end = 0
        for match in self._TOKEN.finditer(template):
            literal, column = template[end : match.start()], match.group(1) or ""
            end = match.end()
            if match.group() in {"{", "}"}:
                raise ValueError(f"the template {template!r} has a lone {match.group()!r}; write it twice for itself")
            self._parts.append((literal + ("" if column else match.group()[0]), column))
        self._parts.append((template[end:], ""))
        self.columns = list(dict.fromkeys(column for _, column in self._parts if column))

    def render(self, row: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises:
            RowError: A column is missing, null or no text.
        """
        return "".join(literal + (as_text(row, column) if column else "") for literal, column in self._parts)


@dataclass(frozen=True)
class TextOptions:
    """What is made of a row; the fields are those of ``dataset`` in a job.

    Attributes:
        task: ``causal`` or ``seq2seq``.
        prompt: Template of the prompt.
        completion: Template of what the model shall answer.
        text: Column, or template, of plain text.
        messages: Column with chat messages.
        keep: Columns that are carried along as text.
        max_length: Tokens per row (seq2seq: of the input).
        max_completion_length: Tokens of a seq2seq target; 0: ``max_length``.
        packing: Put several documents into one row; long plain text is then cut into rows instead of cut off.
    """

    task: Task
    prompt: str = ""
    completion: str = ""
    text: str = ""
    messages: str = ""
    keep: tuple[str, ...] = ()
    max_length: int = 512
    max_completion_length: int = 0
    packing: bool = False

    def __post_init__(self) -> None:
        if sum(map(bool, (self.completion, self.text, self.messages))) != 1:
            raise ValueError("give exactly one of prompt with completion, text, and messages")
        if self.task == "seq2seq" and self.text:
            raise ValueError("a seq2seq model learns from prompt to completion; plain text is for causal models")
        taken = _RESERVED.intersection(self.keep)
        if taken:
            raise ValueError(f"a kept column cannot be called {min(taken)!r}: the shards use that name themselves")
        if self.packing and self.task == "seq2seq":
            raise ValueError("packing is for causal models: the encoder of a seq2seq model would mix the documents")
        if self.packing and self.keep:
            raise ValueError(
                "a packed row holds several documents and cannot keep columns of each; drop one of the two"
            )

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels of their own: everything but plain text, all of which is learned."""
        return not self.text


@dataclass(frozen=True)
class Segment:
    """A stretch of text; the model learns to say it, or only reads it."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Document:
    """A row as text."""

    segments: tuple[Segment, ...]
    completion: str
    kept: Mapping[str, str]

    @property
    def content(self) -> bytes:
        """What makes two documents duplicates of one another."""
        return "\x1e".join(segment.text for segment in self.segments).encode()


@dataclass(frozen=True)
class TokenisedDocument:
    """A row as tokens.

    Attributes:
        input_ids: ``[tokens]``.
        labels: Causal ``[tokens]``, seq2seq ``[target tokens]``; -100 where there is no loss.
        full_length: Tokens of the input before truncation.
        truncated: Whether anything was cut off.
    """

    input_ids: TokenArray
    labels: TokenArray
    full_length: int
    truncated: bool


class Renderer:
    """Raw rows to documents.

    Raises:
        ValueError: The options' templates are malformed.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._prompt = Template(options.prompt)
        self._completion = Template(options.completion)
        self._text = Template(options.text if "{" in options.text else f"{{{options.text}}}" if options.text else "")

    @property
    def columns(self) -> frozenset[str]:
        """Columns that a row must have."""
        templates = self._prompt.columns + self._completion.columns + self._text.columns
        return frozenset(templates) | set(self._options.keep) | ({self._options.messages} - {""})

    def render(self, row: Mapping[str, Any]) -> Document:
        """The text of a row.

        Raises:
            RowError: The row does not have what the options need.
        """
        kept = {column: as_text(row, column) for column in self._options.keep}
        if self._options.messages:
            document = self._render_chat(row, kept)
        elif self._options.text:
            document = Document((Segment(self._text.render(row), True),), "", kept)
        else:
            completion = self._completion.render(row)
            document = Document((Segment(self._prompt.render(row), False), Segment(completion, True)), completion, kept)
        try:
            document.content  # noqa: B018 - text that UTF-8 cannot hold ends here
        except UnicodeEncodeError as error:
            raise RowError(f"the text cannot be written as UTF-8: {error.reason}") from error
        return document

    def _render_chat(self, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        column = self._options.messages
        messages = _messages(row, column)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise RowError(f"column {column!r} has no message of the role 'assistant' to learn from")
        last = answers[-1]
        if self._options.task == "seq2seq":
            prompt = self._chat(messages[:last], generation=True)
            answer = messages[last]["content"]
            return Document((Segment(prompt, False), Segment(answer, True)), answer, kept)
        whole = self._chat(messages)
        segments: list[Segment] = []
        end = 0
        for answer_index in answers:
            before = self._chat(messages[:answer_index], generation=True)
            after = self._chat(messages[: answer_index + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                continue  # the template writes this turn differently once others follow: it cannot be told apart
            segments += [Segment(whole[end : len(before)], False), Segment(whole[len(before) : len(after)], True)]
            end = len(after)
        if not segments:
            raise RowError(
                "the tokenizer's chat template renders an answer differently with and without the turns before it, so "
                "the answers cannot be told from the prompts; use prompt and completion instead"
            )
        rest = [Segment(whole[end:], False)] if whole[end:] else []
        return Document((*segments, *rest), messages[last]["content"], kept)

    def _chat(self, messages: Sequence[Mapping[str, str]], generation: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RowError(f"the tokenizer's chat template refuses the messages: {error}") from error
        return str(text)


class Tokeniser:
    """Documents to tokens.

    Raises:
        ValueError: The tokenizer has no end-of-text token.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token (eos_token), so no answer would end")
        self._options = options
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id

    def tokenise(self, documents: Sequence[Document]) -> Iterator[TokenisedDocument]:
        """The tokens of each document, cut to the options' lengths."""
        return self._seq2seq(documents) if self._options.task == "seq2seq" else self._causal(documents)

    def _seq2seq(self, documents: Sequence[Document]) -> Iterator[TokenisedDocument]:
        prompts = encode_prompts(self._tokenizer, "seq2seq", [document.segments[0].text for document in documents])
        answers = self._tokenizer(text_target=[document.segments[1].text for document in documents], verbose=False)[
            "input_ids"
        ]
        longest_answer = self._options.max_completion_length or self._options.max_length
        for prompt, answer in zip(prompts, answers, strict=True):
            ids, labels = cut_prompt(prompt, self._options.max_length, self._end), self._ended(answer)
            yield TokenisedDocument(
                input_ids=np.array(ids, dtype=np.int32),
                labels=np.array(labels[:longest_answer], dtype=np.int32),
                full_length=len(prompt),
                truncated=len(prompt) > len(ids) or len(labels) > longest_answer,
            )

    def _causal(self, documents: Sequence[Document]) -> Iterator[TokenisedDocument]:
        # A chat template writes the special tokens itself; elsewhere the first segment begins with the tokenizer's.
        chat = bool(self._options.messages)
        starts = [document.segments[0].text for document in documents]
        rests = [segment.text for document in documents for segment in document.segments[1:]]
        first_ids = self._plain(starts) if chat else encode_prompts(self._tokenizer, "causal", starts)
        rest_ids = iter(self._plain(rests))
        for document, first in zip(documents, first_ids, strict=True):
            pieces = [first, *(next(rest_ids) for _ in document.segments[1:])]
            if document.segments[-1].learned and not (chat and self._end in pieces[-1]):
                pieces[-1] = self._ended(pieces[-1])
            ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
            learned = np.repeat([segment.learned for segment in document.segments], [len(piece) for piece in pieces])
            longest = len(ids) if self._options.text and self._options.packing else self._options.max_length
            labels = np.where(learned, ids, np.int32(NO_LOSS))[:longest]
            yield TokenisedDocument(ids[:longest], labels, full_length=len(ids), truncated=len(ids) > longest)

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._end else [*ids, self._end]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, task: Task, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts as the model is trained on them, not truncated.

    They have the special tokens of the tokenizer, but an end-of-text token that it may add is taken off causal ones:
    there the text goes on.
    """
    if not prompts:
        return []
    # Not verbose: it would warn of texts that are longer than the model's limit, which are cut afterwards.
    encoded: list[list[int]] = tokenizer(list(prompts), verbose=False)["input_ids"]
    if task == "seq2seq":
        return encoded
    end = tokenizer.eos_token_id
    return [ids[:-1] if ids and ids[-1] == end else ids for ids in encoded]


def cut_prompt(ids: list[int], max_length: int, end: int) -> list[int]:
    """A seq2seq input of at most ``max_length`` tokens, which ends with the end-of-text token if it did so before."""
    if len(ids) <= max_length:
        return ids
    return [*ids[: max_length - 1], end] if ids[-1] == end else ids[:max_length]


def as_text(row: Mapping[str, Any], column: str) -> str:
    """A column's value as text; numbers and booleans are written as in JSON.

    Raises:
        RowError: The column is missing, null, or holds neither text nor a number.
    """
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise RowError(f"column {column!r} is {'null' if value is None else f'a {type(value).__name__}'}, not text")


def _messages(row: Mapping[str, Any], column: str) -> list[Mapping[str, str]]:
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if isinstance(value, str):  # CSV has no lists
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"column {column!r} is text but no JSON list of messages: {error}") from error
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r} is no list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError(f"a message in column {column!r} lacks text in 'role' or 'content': {message!r:.100}")
    return value
