"""Raw rows to token ids and labels.

Two stages, each one class:

1. `RowRenderer` turns a row into a `Document`: text segments, each with or without loss. The text comes from prompt and
   completion templates, from a plain text column, or from chat messages through the tokenizer's chat template.
2. `DocumentTokenizer` turns a document into input ids and labels, and truncates them.

Only text that the model has to generate carries loss; prompts carry none. Each segment is tokenized on its own, because
at inference the model also gets the prompt's tokens alone. A completion ends with the end-of-text token (EOS).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from spotune.prompting.encoding import encode_prompts, truncate_prompt
from spotune.prompting.template import RowError, Template, column_text
from spotune_trainer.data.batches import NO_LOSS, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = frozenset({"input_ids", "labels", "lengths", "completion"})

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TextOptions:
    """How rows become text and tokens. The fields are those of ``spec.dataset`` in a job.

    Exactly one of ``completion`` (with ``prompt``), ``text`` and ``messages`` is set. The field names are written to a
    dataset's manifest and are part of the key that identifies it.

    Attributes:
        task: ``causal`` or ``seq2seq``.
        prompt: Template of the prompt.
        completion: Template of the expected answer.
        text: Column, or template, of plain text.
        messages: Column with chat messages.
        keep: Columns that are copied into the shards as text.
        max_length: Maximum tokens per row; for seq2seq, of the input.
        max_completion_length: Maximum tokens of a seq2seq target; 0 means ``max_length``.
        packing: Put several documents into one row. Long plain text is then split over rows instead of truncated.

    Raises:
        ValueError: The options contradict each other.
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
            raise ValueError("a seq2seq model needs prompt and completion; plain text is for causal models")
        taken = _RESERVED.intersection(self.keep)
        if taken:
            raise ValueError(f"a kept column cannot be called {min(taken)!r}: the shards already use that name")
        if self.packing and self.task == "seq2seq":
            raise ValueError("packing is for causal models: the encoder of a seq2seq model would mix the documents")
        if self.packing and self.keep:
            raise ValueError(
                "a packed row holds several documents and cannot keep columns of each; remove either keep or packing"
            )

    @property
    def has_labels(self) -> bool:
        """Whether labels are stored. Plain text needs none: all of its tokens carry loss."""
        return not self.text


@dataclass(frozen=True)
class Segment:
    """A piece of a document's text; the model is trained to generate it only if it has loss."""

    text: str
    has_loss: bool


@dataclass(frozen=True)
class Document:
    """A rendered row.

    Attributes:
        segments: The text, in order.
        completion: The reference answer for evaluation; empty for plain text.
        kept: Values of the kept columns, as text.
    """

    segments: tuple[Segment, ...]
    completion: str
    kept: Mapping[str, str]

    @property
    def dedup_key(self) -> bytes:
        """UTF-8 bytes that are equal for duplicates, so that duplicates go into the same split."""
        return "\x1e".join(segment.text for segment in self.segments).encode()


@dataclass(frozen=True)
class TokenizedDocument:
    """Token ids and labels of one document.

    Attributes:
        input_ids: ``[tokens]``.
        labels: Causal ``[tokens]``, seq2seq ``[target tokens]``; -100 where there is no loss.
        full_length: Input tokens before truncation.
        truncated: Whether the input or the target was truncated.
    """

    input_ids: TokenArray
    labels: TokenArray
    full_length: int
    truncated: bool


class RowRenderer:
    """Renders raw rows as documents.

    Args:
        options: Which columns hold the text, and how they are combined.
        tokenizer: Its chat template renders chat messages.

    Raises:
        ValueError: A template of the options is malformed.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._prompt = Template(options.prompt)
        self._completion = Template(options.completion)
        self._text = Template(options.text if "{" in options.text else f"{{{options.text}}}" if options.text else "")

    @property
    def columns(self) -> frozenset[str]:
        """Columns that every row must have."""
        templates = self._prompt.columns + self._completion.columns + self._text.columns
        return frozenset(templates) | set(self._options.keep) | ({self._options.messages} - {""})

    def render(self, row: Mapping[str, Any]) -> Document:
        """The document of one row.

        Raises:
            RowError: The row lacks a column that the options name, or has a value that cannot be rendered.
        """
        kept = {column: column_text(row, column) for column in self._options.keep}
        if self._options.messages:
            document = self._render_chat(row, kept)
        elif self._options.text:
            document = Document((Segment(self._text.render(row), True),), "", kept)
        else:
            completion = self._completion.render(row)
            document = Document((Segment(self._prompt.render(row), False), Segment(completion, True)), completion, kept)
        try:
            document.dedup_key  # noqa: B018 - encodes the text, so it rejects lone surrogates
        except UnicodeEncodeError as error:
            raise RowError(f"the text cannot be encoded as UTF-8: {error.reason}") from error
        return document

    def _render_chat(self, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        """A chat as segments: every assistant turn carries loss (seq2seq: the last one only), all other text none.

        Where a turn lies in the rendered chat is found by rendering the messages up to it. A turn is skipped if the
        chat template renders it differently once more messages follow, because its position is then unknown.
        """
        column = self._options.messages
        messages = _read_messages(row, column)
        assistant_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not assistant_turns:
            raise RowError(f"column {column!r} has no message of the role 'assistant' to learn from")
        last = assistant_turns[-1]
        if self._options.task == "seq2seq":
            prompt = self._apply_chat_template(messages[:last], generation=True)
            answer = messages[last]["content"]
            return Document((Segment(prompt, False), Segment(answer, True)), answer, kept)
        whole = self._apply_chat_template(messages)
        segments: list[Segment] = []
        position = 0  # of the first character that is in no segment yet
        for turn in assistant_turns:
            before = self._apply_chat_template(messages[:turn], generation=True)
            after = self._apply_chat_template(messages[: turn + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                continue
            segments += [Segment(whole[position : len(before)], False), Segment(whole[len(before) : len(after)], True)]
            position = len(after)
        if not segments:
            raise RowError(
                "the tokenizer's chat template renders an answer differently when it renders the whole chat, so the "
                "answers cannot be separated from the prompts. Use dataset.prompt and dataset.completion instead"
            )
        remainder = [Segment(whole[position:], False)] if whole[position:] else []
        return Document((*segments, *remainder), messages[last]["content"], kept)

    def _apply_chat_template(self, messages: Sequence[Mapping[str, str]], generation: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RowError(f"the tokenizer's chat template cannot render the messages: {error}") from error
        return str(text)


class DocumentTokenizer:
    """Tokenizes documents and sets their labels.

    Args:
        options: The task and the maximum lengths.
        tokenizer: Needs an end-of-text token (EOS), which ends every completion.

    Raises:
        ValueError: The tokenizer has no end-of-text token.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token (eos_token), so the model could not learn to end an answer"
            )
        self._options = options
        self._tokenizer = tokenizer
        self._eos_token_id: int = tokenizer.eos_token_id

    def tokenize(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        """Token ids and labels of each document, in order, truncated to the options' maximum lengths.

        With packing, plain text is not truncated: ``packing.split_document`` splits it later.
        """
        return self._seq2seq(documents) if self._options.task == "seq2seq" else self._causal(documents)

    def _seq2seq(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        prompts = encode_prompts(self._tokenizer, "seq2seq", [document.segments[0].text for document in documents])
        targets = self._tokenizer(text_target=[document.segments[1].text for document in documents], verbose=False)[
            "input_ids"
        ]
        max_target_length = self._options.max_completion_length or self._options.max_length
        for prompt, target in zip(prompts, targets, strict=True):
            ids = truncate_prompt(prompt, self._options.max_length, self._eos_token_id)
            labels = self._with_eos(target)
            yield TokenizedDocument(
                input_ids=np.array(ids, dtype=np.int32),
                labels=np.array(labels[:max_target_length], dtype=np.int32),
                full_length=len(prompt),
                truncated=len(prompt) > len(ids) or len(labels) > max_target_length,
            )

    def _causal(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        # A chat template writes special tokens such as BOS itself. Otherwise the tokenizer adds its own to the first
        # segment, and none to those after it.
        is_chat = bool(self._options.messages)
        first_texts = [document.segments[0].text for document in documents]
        later_texts = [segment.text for document in documents for segment in document.segments[1:]]
        first_ids = (
            self._encode_plain(first_texts) if is_chat else encode_prompts(self._tokenizer, "causal", first_texts)
        )
        later_ids = iter(self._encode_plain(later_texts))
        for document, first in zip(documents, first_ids, strict=True):
            pieces = [first, *(next(later_ids) for _ in document.segments[1:])]
            if document.segments[-1].has_loss and not (is_chat and self._eos_token_id in pieces[-1]):
                pieces[-1] = self._with_eos(pieces[-1])
            ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
            has_loss = np.repeat([segment.has_loss for segment in document.segments], [len(piece) for piece in pieces])
            max_length = len(ids) if self._options.text and self._options.packing else self._options.max_length
            labels = np.where(has_loss, ids, np.int32(NO_LOSS))[:max_length]
            yield TokenizedDocument(ids[:max_length], labels, full_length=len(ids), truncated=len(ids) > max_length)

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without any special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._eos_token_id else [*ids, self._eos_token_id]


def _read_messages(row: Mapping[str, Any], column: str) -> list[Mapping[str, str]]:
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if isinstance(value, str):  # a CSV column holds the list as JSON text
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"column {column!r} is text but not a JSON list of messages: {error}") from error
    if not isinstance(value, list) or not value:
        raise RowError(f"column {column!r} is not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError(f"a message in column {column!r} lacks text in 'role' or 'content': {message!r:.100}")
    return value
