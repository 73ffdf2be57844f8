"""Raw rows to documents: text segments, each with or without loss.

The text comes from prompt and completion templates, from a plain text column, or from chat messages through the
tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spotune.prompting.template import RowError, Template, column_text
from spotune_trainer.data.chat.messages import Chat, read_chat, read_tools
from spotune_trainer.data.chat.renderer import ChatRenderer, TrainOn
from spotune_trainer.data.labels.positions import LabelIds, column_value, read_word_labels
from spotune_trainer.data.rows.documents import Document, Segment, chat_document
from spotune_trainer.data.rows.labelled_answers import labelled_document, read_desirable
from spotune_trainer.data.rows.pairs import check_chat_column, pair_documents
from spotune_trainer.data.rows.related_texts import texts_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from spotune_trainer.data.rows.options import TextOptions


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

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the chat template."""
        return self._chats.warnings if self._chats is not None else ()

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
            chat = self._read_chat(row, "messages", self._options.messages)
            document = chat_document(chat, self._chats.render(chat), kept)
        elif self._options.has_labelled_texts:
            document = self._labelled(row, kept)
        elif self._texts:
            document = texts_document({name: self._render(name, row) for name in self._texts}, kept)
        elif self._options.text:
            text = self._render("text", row)
            document = Document((Segment(text, bool(text.strip())),), "", kept)
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
            raise RowError(f"the text cannot be encoded as UTF-8: {error.reason}; correct or remove the row") from error
        return document

    def _answer(self, name: str, row: Mapping[str, Any], kept: Mapping[str, str]) -> Document:
        """A prompt with an answer to it: by templates, or the chat in the column of the answer's template."""
        if self._chats is not None:
            chat = self._read_chat(row, name, self._templates[name].columns[0])
            return chat_document(chat, self._chats.render(chat), kept)
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
            raise RowError("the text is empty: remove the row, or correct it or dataset.text")
        with _naming("label"):
            value = column_value(row, self._label)
        label = self._label_ids.position(value)
        return Document((Segment(text, False),), "", kept, labels=(label,))

    def _read_chat(self, row: Mapping[str, Any], name: str, column: str) -> Chat:
        """The chat in the column that the field `name` names, with the tools of the row."""
        tools = self._options.tools
        if tools:
            with _naming("tools"):  # first, since errors of the chat name another field
                read_tools(row, tools)
        with _naming(name):
            return read_chat(row, column, tools)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Add to errors of a row the field of the job that reads the column."""
    try:
        yield
    except RowError as error:
        raise RowError(f"{error}: correct the row, or dataset.{field} of the job") from error
