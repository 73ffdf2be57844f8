"""Raw rows to token ids and labels.

Two stages, each one class:

1. `RowRenderer` turns a row into a `Document`: text segments, each with or without loss. The text comes from prompt and
   completion templates, from a plain text column, or from chat messages through the tokenizer's chat template.
2. `DocumentTokenizer` turns a document into input ids and labels, and truncates them.

Only text that the model has to generate carries loss; prompts carry none. Each segment of a prompt with its completion
is tokenized on its own, because at inference the model also gets the prompt's tokens alone. A chat is tokenized whole,
as at inference, and divided only where a token would lie in two segments. A completion ends with the end-of-text token
(EOS).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from spotune.prompting.encoding import encode_prompts, truncate_prompt
from spotune.prompting.template import RowError, Template, column_text
from spotune_trainer.data.batches import NO_LOSS, Task
from spotune_trainer.data.chat.messages import read_chat
from spotune_trainer.data.chat.renderer import ChatRenderer, TrainOn
from spotune_trainer.data.documents import Document, Segment, TokenizedDocument, chat_document
from spotune_trainer.data.labels.encoding import EncodedText, tokenize_texts, tokenize_word_list
from spotune_trainer.data.labels.positions import LabelIds, column_value, read_word_labels
from spotune_trainer.data.pairs import (
    check_chat_column,
    join_mismatched,
    join_pairs,
    labelled_document,
    pair_documents,
    read_desirable,
    texts_document,
    tokenize_related_texts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = frozenset(
    {
        "input_ids",
        "labels",
        "lengths",
        "pair_lengths",
        "text_lengths",
        "text_label",
        "token_labels",
        "desirable",
        "completion",
    }
)


@dataclass(frozen=True)
class TextOptions:
    """How rows become text and tokens. The fields are those of ``spec.dataset`` in a job.

    Exactly one of ``completion`` (with ``prompt``), ``text``, ``messages``, ``chosen`` and ``query`` is set. The field
    names are written to a dataset's manifest and are part of the key that identifies it.

    Attributes:
        task: ``causal`` or ``seq2seq``.
        prompt: Template of the prompt.
        completion: Template of the expected answer.
        text: Column, or template, of plain text.
        messages: Column with chat messages.
        tools: Column with the tools that a chat may call.
        chosen: Template of the preferred answer of a pair; without a prompt, a column with a chat that ends with it.
        rejected: Template of the other answer of a pair, in the same form.
        label: Column with the label of a row, in braces. With ``text``, that of the text; all labels are in ``labels``.
            With ``prompt`` and ``completion``, or ``messages``, whether the answer is desirable.
        labels: Names of all labels of texts or words.
        label_each_word: Whether ``text`` is a column with a list of words, and ``label`` one with the label of each.
        query: Template of the text that an embedding brings near to ``positive``.
        positive: Template of the other text.
        negative: Template of a text that is not near to ``query``; may be empty.
        train_on: Which text of a chat carries loss.
        train_trailing_whitespace: Whether whitespace after the token that ends a turn carries loss.
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
    tools: str = ""
    train_on: TrainOn = "assistant"
    train_trailing_whitespace: bool = False
    chosen: str = ""
    rejected: str = ""
    label: str = ""
    labels: tuple[str, ...] = ()
    label_each_word: bool = False
    query: str = ""
    positive: str = ""
    negative: str = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.completion, self.text, self.messages, self.chosen, self.query))) != 1:
            raise ValueError(
                "give exactly one of prompt with completion, text, messages, chosen with rejected, query with positive"
            )
        if self.several_documents and (self.task == "seq2seq" or self.packing):
            raise ValueError(f"{self.several_documents} are not for seq2seq models, and cannot be packed")
        if self.label:
            self._check_label()
        if self.task == "seq2seq" and self.text:
            raise ValueError("a seq2seq model needs prompt and completion; plain text is for causal models")
        if self.task == "seq2seq" and self.messages and self.train_on == "all":
            raise ValueError("trainOn: all is for causal models: a seq2seq model learns the last answer of a chat")
        if not self.messages and (self.tools or self.train_on != "assistant" or self.train_trailing_whitespace):
            raise ValueError("tools, trainOn and trainTrailingWhitespace are for chats: set messages, or remove them")
        taken = _RESERVED.intersection(self.keep)
        if taken:
            raise ValueError(f"a kept column cannot be called {min(taken)!r}: the shards already use that name")
        if self.packing and self.task == "seq2seq":
            raise ValueError("packing is for causal models: the encoder of a seq2seq model would mix the documents")
        if self.packing and self.keep:
            raise ValueError(
                "a packed row holds several documents and cannot keep columns of each; remove either keep or packing"
            )

    def _check_label(self) -> None:
        if self.has_labelled_answers:
            return
        if not self.text or not self.labels:
            raise ValueError("a label needs the text that it is of, and the names of all labels: set text and labels")
        if self.task == "seq2seq" or self.packing:
            raise ValueError("labels are for encoders and causal models, whose rows cannot be packed")

    @property
    def has_labels(self) -> bool:
        """Whether labels of tokens are stored. Texts alone need none: all tokens of plain text carry loss."""
        return not (self.text or self.query)

    @property
    def several_documents(self) -> str:
        """What the documents of a row are if it has several; empty otherwise."""
        if self.has_labelled_answers:
            return "answers with a label"
        return "pairs of chosen and rejected answers" if self.chosen else "texts with embeddings" if self.query else ""

    @property
    def has_labelled_answers(self) -> bool:
        """Whether rows are answers with a label, for KTO."""
        return bool(self.label and (self.completion or self.messages))

    @property
    def has_labelled_texts(self) -> bool:
        """Whether rows are texts with a label, or words with one each, for a classifier."""
        return bool(self.label and self.text)

    @property
    def is_chat(self) -> bool:
        """Whether rows are chats, or pairs of chats, which the tokenizer's chat template renders."""
        return bool(self.messages or (self.chosen and not self.prompt))


class RowRenderer:
    """Renders raw rows as documents.

    Args:
        options: Which columns hold the text, and how they are combined.
        tokenizer: Its chat template renders chat messages.

    Raises:
        ValueError: A template of the options is malformed, or chats are to be rendered without a chat template.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self._options = options
        train_on: TrainOn = "last" if options.chosen or options.has_labelled_answers else options.train_on
        self._chats = ChatRenderer(tokenizer, train_on, options.train_trailing_whitespace) if options.is_chat else None
        text = options.text if "{" in options.text or not options.text else f"{{{options.text}}}"
        self._templates = {
            "prompt": Template(options.prompt),
            "completion": Template(options.completion),
            "chosen": Template(options.chosen),
            "rejected": Template(options.rejected),
            "text": Template(text),
            "query": Template(options.query),
            "positive": Template(options.positive),
            "negative": Template(options.negative),
        }
        if options.chosen and self._chats is not None:
            for name in ("chosen", "rejected"):
                check_chat_column(self._templates[name])
        self._texts = [name for name in ("query", "positive", "negative") if getattr(options, name)]
        self._label_ids = LabelIds(options.labels)
        self._label = options.label.strip("{}")

    @property
    def columns(self) -> frozenset[str]:
        """Columns that every row must have."""
        templates = [column for template in self._templates.values() for column in template.columns]
        named = {self._options.messages, self._options.tools, self._label} - {""}
        return frozenset(templates) | set(self._options.keep) | named

    def render(self, row: Mapping[str, Any]) -> Document:
        """The document of one row.

        Raises:
            RowError: The row lacks a column that the options name, or has a value that cannot be rendered.
        """
        with _naming("keep"):
            kept = {column: column_text(row, column) for column in self._options.keep}
        if self._options.chosen:
            answers = (self._answer(name, row, kept) for name in ("chosen", "rejected"))
            document = pair_documents(*answers)
        elif self._chats is not None:
            document = self._render_chat(self._chats, row, kept)
        elif self._options.has_labelled_texts:
            document = self._labelled(row, kept)
        elif self._texts:
            document = texts_document({name: self._render(name, row) for name in self._texts}, kept)
        elif self._options.text:
            document = Document((Segment(self._render("text", row), True),), "", kept)
        else:
            document = self._answer("completion", row, kept)
            if not document.completion.strip():
                raise RowError("the completion is empty: remove the row, or correct it or dataset.completion")
        if self._options.has_labelled_answers:
            with _naming("label"):
                desirable = read_desirable(row, self._label)
            document = labelled_document(document, desirable=desirable)
        try:
            document.dedup_key  # noqa: B018 - encodes the text, so it rejects lone surrogates
        except UnicodeEncodeError as error:
            raise RowError(f"the text cannot be encoded as UTF-8: {error.reason}") from error
        return document

    def _answer(self, name: str, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        """A prompt with an answer to it: by templates, or the chat in the column of the answer's template."""
        if self._chats is not None:
            return chat_document(self._chats.render(read_chat(row, self._templates[name].columns[0])), kept)
        text = self._render(name, row)
        return Document((Segment(self._render("prompt", row), False), Segment(text, True)), text, kept)

    def _render(self, name: str, row: Mapping[str, Any]) -> str:
        with _naming(name):
            return self._templates[name].render(row)

    def _labelled(self, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        """A text with its label, or words with their labels."""
        if self._options.label_each_word:
            word_list, names = read_word_labels(row, self._templates["text"].columns[0], self._label)
            labels = tuple(map(self._label_ids.position, names))
            text = " ".join(word_list)
            return Document((Segment(text, False),), "", kept, labels=labels, word_list=tuple(word_list))
        text = self._render("text", row)
        if not text.strip():
            raise RowError("the text is empty: remove the row, or correct it")
        with _naming("label"):
            label = self._label_ids.position(column_value(row, self._label))
        return Document((Segment(text, False),), "", kept, labels=(label,))

    def _render_chat(self, chats: ChatRenderer, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        chat = read_chat(row, self._options.messages, self._options.tools)
        if self._options.task == "seq2seq":
            last = chat.assistant_turns[-1]
            answer = chat.messages[last]["content"]
            if not answer:
                raise RowError(f"message {last + 1} has no content, which a seq2seq model could learn")
            return Document((Segment(chats.prompt(chat, last), False), Segment(answer, True)), answer, kept)
        return chat_document(chats.render(chat), kept)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Add to errors of a row the field of the job that reads the column."""
    try:
        yield
    except RowError as error:
        raise RowError(f"{error}: correct the row, or dataset.{field} of the job") from error


class DocumentTokenizer:
    """Tokenizes documents and sets their labels.

    Args:
        options: The task and the maximum lengths.
        tokenizer: Needs an end-of-text token (EOS), which ends every completion, unless rows are texts with labels or
            with embeddings.

    Raises:
        ValueError: The tokenizer has no end-of-text token, or cannot tell which token belongs to which word.
    """

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        if options.label_each_word and not tokenizer.is_fast:
            raise ValueError("labels of words need a fast tokenizer, which knows the characters of its tokens")
        if tokenizer.eos_token_id is None and not (options.has_labelled_texts or options.query):
            raise ValueError(
                "the tokenizer has no end-of-text token (eos_token), so the model could not learn to end an answer"
            )
        self._options = options
        self._tokenizer = tokenizer
        self._eos_token_id = tokenizer.eos_token_id

    def tokenize(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        """Token ids and labels of each document, in order, truncated to the options' maximum lengths.

        With packing, plain text is not truncated: ``packing.split_document`` splits it later.
        """
        if self._options.has_labelled_texts:
            return self._labelled(documents)
        if self._options.chosen:
            answers = [answer for pair in documents for answer in (pair, pair.rejected) if answer is not None]
            return join_pairs(self._causal(answers))
        if documents and all(document.mismatched is not None for document in documents):
            both = [each for own in documents for each in (own, own.mismatched) if each is not None]
            return join_mismatched(self._causal(both))
        if self._options.query:
            return tokenize_related_texts(documents, self._tokenizer, self._options.max_length)
        return self._seq2seq(documents) if self._options.task == "seq2seq" else self._causal(documents)

    def _labelled(self, documents: Sequence[Document]) -> Iterator[TokenizedDocument]:
        """Texts with their label, or with the label of each word at its first token, as in transformers' run_ner.py."""
        max_length = self._options.max_length
        encoded: Iterator[EncodedText]
        if self._options.label_each_word:
            encoded = (tokenize_word_list(self._tokenizer, document.word_list, max_length) for document in documents)
        else:
            encoded = tokenize_texts(self._tokenizer, [document.segments[0].text for document in documents], max_length)
        for document, text in zip(documents, encoded, strict=True):
            labels = np.array(document.labels, dtype=np.int32)
            if self._options.label_each_word:
                labels = np.full(len(text.input_ids), NO_LOSS, dtype=np.int32)
                for word, token in text.first_tokens.items():
                    labels[token] = document.labels[word]
            yield TokenizedDocument(
                np.array(text.input_ids, dtype=np.int32),
                labels,
                full_length=text.full_length,
                truncated=text.full_length > len(text.input_ids),
            )

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
        is_chat = self._options.is_chat
        encoded = self._encode_chats(documents) if is_chat else self._encode_segments(documents)
        for document, pieces in zip(documents, encoded, strict=True):
            if document.segments[-1].has_loss and not (is_chat and self._eos_token_id in pieces[-1]):
                pieces[-1] = self._with_eos(pieces[-1])
            ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
            sizes = [len(piece) for piece in pieces]
            has_loss = np.repeat([segment.has_loss for segment in document.segments], sizes)
            max_length = len(ids) if self._options.text and self._options.packing else self._options.max_length
            labels = np.where(has_loss, ids, np.int32(NO_LOSS))[:max_length]
            yield TokenizedDocument(
                ids[:max_length],
                labels,
                full_length=len(ids),
                truncated=len(ids) > max_length,
                cut_turns=_count_cut_turns(document.segments, sizes, max_length),
            )

    def _encode_segments(self, documents: Sequence[Document]) -> Iterator[list[list[int]]]:
        """Token ids of each segment. The first has the special tokens that the tokenizer adds, those after it none."""
        first_ids = encode_prompts(self._tokenizer, "causal", [document.segments[0].text for document in documents])
        later_ids = iter(self._encode_plain([s.text for document in documents for s in document.segments[1:]]))
        for document, first in zip(documents, first_ids, strict=True):
            yield [first, *(next(later_ids) for _ in document.segments[1:])]

    def _encode_chats(self, documents: Sequence[Document]) -> Iterator[list[list[int]]]:
        """Token ids of each segment. A chat template writes special tokens such as BOS itself.

        The ids are those of the whole text, which the model also gets at inference. Some tokenizers give a text other
        ids if it is divided: SentencePiece puts a space before every text.
        """
        if not documents:
            return
        texts = ["".join(segment.text for segment in document.segments) for document in documents]
        fast = self._tokenizer.is_fast
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        offsets = encoded["offset_mapping"] if fast else [[]] * len(texts)
        for document, whole, places in zip(documents, encoded["input_ids"], offsets, strict=True):
            yield _split_at_offsets(document.segments, whole, places) or self._divide(document.segments, whole)

    def _divide(self, segments: Sequence[Segment], whole: list[int]) -> list[list[int]]:
        """Token ids of each segment: those of the whole text, divided only where a token lies in two segments.

        Args:
            segments: The segments.
            whole: Token ids of the segments' whole text.
        """
        pieces: list[list[int]] = []
        text, ids, taken = "", whole, 0  # since the last division: the text so far, all token ids, ids in pieces
        for number, segment in enumerate(segments):
            text += segment.text
            before = self._encode_plain([text])[0] if number + 1 < len(segments) else ids
            if ids[: len(before)] == before:
                pieces.append(ids[taken : len(before)])
                taken = len(before)
            else:
                pieces.append(before[taken:])
                text, taken = "", 0
                ids = self._encode_plain(["".join(later.text for later in segments[number + 1 :])])[0]
        return pieces

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without any special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._eos_token_id else [*ids, self._eos_token_id]


def _split_at_offsets(
    segments: Sequence[Segment], ids: list[int], offsets: Sequence[tuple[int, int]]
) -> list[list[int]] | None:
    """Token ids of each segment; None if the offsets do not show where each segment ends.

    Args:
        segments: The segments.
        ids: Token ids of the segments' whole text.
        offsets: First character of each token, and the character after its last one.
    """
    if not offsets:
        return None
    starts, stops_of_tokens = np.array(offsets).T
    stops = np.cumsum([len(segment.text) for segment in segments])[:-1]
    cuts = np.searchsorted(stops_of_tokens, stops, side="right")  # the first token that ends after a segment
    if np.any(np.append(starts, stops[-1:])[cuts] != stops) or np.any(np.append(0, stops_of_tokens)[cuts] != stops):
        return None  # a token lies in two segments, or a gap, since some tokenizers leave spaces out of offsets
    bounds = [0, *cuts.tolist(), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(bounds)]


def _count_cut_turns(segments: Sequence[Segment], sizes: Sequence[int], max_length: int) -> int:
    """Turns with loss whose tokens all lie beyond the maximum length."""
    starts = np.cumsum([0, *sizes])
    turns: dict[int, bool] = {}
    for segment, start in zip(segments, starts, strict=False):
        if segment.has_loss and segment.turn is not None:
            turns[segment.turn] = turns.get(segment.turn, True) and bool(start >= max_length)
    return sum(turns.values())
