"""Tokenizes one part of the raw input into MDS shards, in a folder of its own.

The folder is written under a temporary name and renamed when it is complete. So a folder with its final name is always
complete, even if the writing process is killed at any time.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from streaming.base.format.mds import MDSWriter

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.chat.renderer import SKIPPED
from spotune_trainer.data.preparation.inputs import Part
from spotune_trainer.data.preparation.packing import PackedRow, Packer, split_document
from spotune_trainer.data.preparation.raw_files import FileRange
from spotune_trainer.data.preparation.readers import RawRow, read_rows
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.labelled_answers import with_mismatched
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.pairs import split_pair, teaches
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from spotune_trainer.files import fsync_directory, fsync_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "eval")
SHARD_HASH = "xxh3_64"
SUMMARY = "part.json"
_TOKENIZER_BATCH = 256  # documents per tokenizer call, to amortize its overhead
_MAX_PROBLEMS = 5  # reported per split


@dataclass(frozen=True)
class PartOptions:
    """How a part is written.

    Attributes:
        text: How rows become text and tokens.
        eval_fraction: Fraction of the documents that go into the split ``eval``, chosen by a hash of their text.
        eval_seed: Seed of that hash.
        shard_size: Maximum bytes per shard.
        max_skipped: Maximum assistant turns of chats that may be left out because of the chat template.
    """

    text: TextOptions
    eval_fraction: float = 0.0
    eval_seed: int = 42
    shard_size: int = 1 << 25
    max_skipped: int = 0


@dataclass
class SplitCounts:
    """Counts of one split. The field names are keys of ``part.json``.

    Attributes:
        documents: Raw rows read.
        samples: Rows written to shards; with packing fewer than documents.
        tokens: Input tokens written.
        loss_tokens: Labels that carry loss.
        truncated: Documents that were truncated.
        dropped: Documents without a token that carries loss, for example because the prompt fills the whole row. Pairs
            whose answers are the same within the maximum length, too.
        cut_tokens: Input tokens beyond the maximum length.
        dropped_tokens: Input tokens, within the maximum length, of dropped documents.
        turns: Assistant turns of chats by outcome: see `TurnOutcome`; ``cut`` are turns beyond the maximum length.
        reasoning_removed: Trained turns whose reasoning the chat template removes.
        problems: The first turns that were skipped: file, line and reason.
        lengths: Histogram: number of documents by input tokens before truncation; of a pair those of the longer one.
        pair_tokens: Histogram, only with packed pairs: number of pairs by the tokens of both of their documents.
        row_tokens: Histogram, only with packed pairs: number of rows by tokens.
        shards: The shards' entries for ``index.json``.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    truncated: int = 0
    dropped: int = 0
    cut_tokens: int = 0
    dropped_tokens: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    reasoning_removed: int = 0
    problems: list[str] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    pair_tokens: Counter[int] = field(default_factory=Counter)
    row_tokens: Counter[int] = field(default_factory=Counter)
    shards: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: SplitCounts) -> None:
        """Add the counts of another part."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        del self.problems[_MAX_PROBLEMS:]


@dataclass
class PartSummary:
    """What was written for one part: counts by split."""

    splits: dict[str, SplitCounts]


@dataclass(frozen=True)
class TokenizedRow:
    """A row, its tokens, and the problems of its chat with file and line."""

    document: Document
    tokens: TokenizedDocument
    problems: Sequence[str]


def raise_error(error: JobError) -> None:
    """Raise the error of a row."""
    raise error


def read_summary(folder: Path) -> PartSummary | None:
    """The summary of a complete part; None if the part is not complete."""
    try:
        content = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    splits = {name: SplitCounts(**split) for name, split in content.items()}
    for split in splits.values():
        split.turns = Counter(split.turns)
        for name in ("lengths", "pair_tokens", "row_tokens"):
            setattr(split, name, Counter({int(length): count for length, count in getattr(split, name).items()}))
    return PartSummary(splits)


def write_part(folder: Path, part: Part, options: PartOptions, tokenizer: PreTrainedTokenizerBase) -> PartSummary:
    """Tokenize a part into ``folder/train`` and ``folder/eval``. Does nothing if the part is complete.

    Raises:
        JobError: A row cannot be read or rendered, or too many turns of chats are left out. The message names file and
            line.
    """
    done = read_summary(folder)
    if done is not None:
        return done
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        writers = {split: _SplitWriter(temporary / split, options, packing=split == "train") for split in SPLITS}
        _write_documents(part, options, tokenizer, writers)
        summary = PartSummary({split: writer.finish() for split, writer in writers.items()})
        write_json(temporary / SUMMARY, {name: vars(split) for name, split in summary.splits.items()})
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_directory(folder.parent)
    return summary


def skipped_message(problems: Sequence[str], skipped: int, max_skipped: int) -> str:
    """The error message for turns that are left out because of the chat template.

    Args:
        problems: File, line and reason of the first of them.
        skipped: Their number so far.
        max_skipped: How many are allowed.
    """
    count = f"{skipped} assistant turns cannot be trained on (maxSkipped: {max_skipped}): " if max_skipped else ""
    return (
        f"{count}{'; '.join(problems)}. Correct the data, use another chat template, or raise dataset.maxSkipped to "
        "leave such turns out"
    )


def tokenize_part(
    part: Part,
    options: PartOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int | None = None,
    refuse: Callable[[JobError], None] = raise_error,
) -> Iterator[TokenizedRow]:
    """Read, render and tokenize the rows of a part, in order.

    Args:
        part: Where the rows are.
        options: How they become text and tokens.
        tokenizer: The tokenizer.
        max_rows: Read so many rows from the start; None reads all.
        refuse: Called with the error of a row that cannot be rendered, or with which too many turns of chats are left
            out; the error names file and line. If it returns, the row is left out.

    Raises:
        JobError: A file is damaged or malformed; the message names file and line.
        InfrastructureError: A store did not send its file.
    """
    document_tokenizer = DocumentTokenizer(options.text, tokenizer)
    documents = _render_rows(part, RowRenderer(options.text, tokenizer), options.max_skipped, max_rows, refuse)
    last: list[Document] = []
    while chunk := list(islice(documents, _TOKENIZER_BATCH)):
        rendered = [document for document, _ in chunk]
        if options.text.has_labelled_answers:
            rendered, last = with_mismatched(rendered, last), rendered[-1:]
        for document, (_, problems), tokens in zip(rendered, chunk, document_tokenizer.tokenize(rendered), strict=True):
            yield TokenizedRow(document, tokens, problems)


def useful_pieces(tokens: TokenizedDocument, text: TextOptions) -> list[TokenizedDocument]:
    """What is written of a document: of a long text that is packed, several rows. Without a token with loss, nothing.

    Args:
        tokens: The document's tokens.
        text: How rows become text and tokens.
    """
    return [piece for piece in _pieces(tokens, text) if _loss_tokens(piece, text)]


def _write_documents(
    part: Part, options: PartOptions, tokenizer: PreTrainedTokenizerBase, writers: dict[str, _SplitWriter]
) -> None:
    for row in tokenize_part(part, options, tokenizer):
        writers[_assign_split(row.document, options)].add(row.document, row.tokens, row.problems)


def _read_part(part: Part, renderer: RowRenderer) -> Iterator[tuple[FileRange, int, RawRow]]:
    for file_range in part:
        for number, row in read_rows(file_range, renderer.columns):
            yield file_range, number, row


def _render_rows(
    part: Part,
    renderer: RowRenderer,
    max_skipped: int,
    max_rows: int | None,
    refuse: Callable[[JobError], None],
) -> Iterator[tuple[Document, list[str]]]:
    """Each row's document, and the problems of its chat with file and line."""
    skipped = 0
    for file_range, number, row in islice(_read_part(part, renderer), max_rows):
        try:
            document = renderer.render(row)
        except RowError as error:
            refused = JobError(f"{file_range.location(number)}: {error}")
            refused.__cause__ = error
            refuse(refused)
            continue
        problems = []
        if document.chat is not None and document.chat.problems:
            problems = [f"{file_range.location(number)}: {problem}" for problem in document.chat.problems]
            skipped += sum(outcome in SKIPPED for outcome in document.chat.outcomes.values())
            if skipped > max_skipped:
                refuse(JobError(skipped_message(problems[:1], skipped, max_skipped)))
                continue
        yield document, problems


def _pieces(tokens: TokenizedDocument, text: TextOptions) -> Iterator[TokenizedDocument]:
    if text.has_labelled_answers or text.query:
        return iter([tokens])
    if tokens.pair_lengths is not None:
        return iter([tokens] if teaches(tokens) else [])
    if text.task == "seq2seq" or text.has_labelled_texts:
        return iter([tokens])
    return split_document(tokens, text.max_length)


def _loss_tokens(tokens: TokenizedDocument, text: TextOptions) -> int:
    if text.has_labelled_answers:
        tokens = split_pair(tokens)[0]  # nothing is learned from the mismatched document
    # The first token of a causal document is not predicted, because no token precedes it.
    labels = tokens.labels if text.task == "seq2seq" or text.has_labelled_texts else tokens.labels[1:]
    return int((labels != NO_LOSS).sum())


def _assign_split(document: Document, options: PartOptions) -> str:
    """The split of a document, by a hash of its text, so that duplicates go into the same split."""
    share = xxhash.xxh3_64_intdigest(document.dedup_key, seed=options.eval_seed) / 2**64
    return "eval" if share < options.eval_fraction else "train"


class _SplitWriter:
    """Writes the rows of one split as MDS shards, and counts them."""

    def __init__(self, folder: Path, options: PartOptions, *, packing: bool) -> None:
        self._folder = folder
        self._text = options.text
        self._packer = Packer(options.text.row_length) if options.text.packing and packing else None
        self._counts = SplitCounts()
        self._writer = MDSWriter(
            out=str(folder), columns=self._columns(), hashes=[SHARD_HASH], size_limit=options.shard_size
        )

    def add(self, document: Document, tokens: TokenizedDocument, problems: Sequence[str]) -> None:
        counts = self._counts
        counts.documents += 1
        counts.truncated += tokens.truncated
        counts.lengths[tokens.limited_length] += 1
        counts.cut_tokens += tokens.full_length - len(tokens.input_ids)
        counts.problems += problems[: _MAX_PROBLEMS - len(counts.problems)]
        if document.chat is not None:
            counts.turns.update(document.chat.outcomes.values())
            counts.turns += Counter(cut=tokens.cut_turns)
            counts.turns -= Counter(trained=tokens.cut_turns)
            counts.reasoning_removed += document.chat.reasoning_removed
        useful = useful_pieces(tokens, self._text)
        if not useful:
            counts.dropped += 1
            counts.dropped_tokens += len(tokens.input_ids)
        for piece in useful:
            counts.loss_tokens += _loss_tokens(piece, self._text)
            counts.tokens += len(piece.input_ids)
            if self._packer is None:
                self._write(self._row(document, piece))
            else:
                if piece.pair_lengths is not None:
                    counts.pair_tokens[len(piece.input_ids)] += 1
                for row in self._packer.add(piece):
                    self._write_packed(row)

    def finish(self) -> SplitCounts:
        if self._packer is not None:
            for row in self._packer.flush():
                self._write_packed(row)
        if self._writer.new_samples:
            self._writer.flush_shard()
            self._writer._reset_cache()
        self._writer.executor.submit(int).result()  # finish() sleeps for a second if its pool has not begun all tasks
        self._writer.finish()
        index = self._folder / "index.json"
        self._counts.shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
        index.unlink()  # a part is not a dataset of its own
        for shard in self._counts.shards:
            fsync_file(self._folder / shard["raw_data"]["basename"])
        fsync_directory(self._folder)
        return self._counts

    def _columns(self) -> dict[str, str]:
        columns = {"input_ids": "ndarray:int32"}
        if self._text.has_labelled_texts:
            column = {"token_labels": "ndarray:int32"} if self._text.label_each_word else {"text_label": "int"}
            return columns | column | dict.fromkeys(self._text.keep, "str")
        if self._text.has_labels:
            columns["labels"] = "ndarray:int32"
        if self._packer is not None:
            return columns | {"packed_pair_lengths" if self._text.chosen else "lengths": "ndarray:int32"}
        if self._text.query:
            columns["text_lengths"] = "ndarray:int32"
        elif self._text.has_labelled_answers:
            columns |= {"pair_lengths": "ndarray:int32", "desirable": "uint8"}
        elif self._text.chosen:
            columns["pair_lengths"] = "ndarray:int32"
        elif self._text.has_labels:
            columns["completion"] = "str"
        return columns | dict.fromkeys(self._text.keep, "str")

    def _row(self, document: Document, tokens: TokenizedDocument) -> dict[str, Any]:
        row: dict[str, Any] = {"input_ids": tokens.input_ids, **document.kept}
        if self._text.has_labelled_texts:
            labels = {"token_labels": tokens.labels} if document.word_list else {"text_label": int(tokens.labels[0])}
            return row | labels
        if self._text.query:
            return row | {"text_lengths": tokens.pair_lengths}
        if tokens.pair_lengths is not None:
            label = {} if document.desirable is None else {"desirable": np.uint8(document.desirable)}
            return row | {"labels": tokens.labels, "pair_lengths": tokens.pair_lengths, **label}
        if self._text.has_labels:
            row |= {"labels": tokens.labels, "completion": document.completion}
        return row

    def _write_packed(self, packed: PackedRow) -> None:
        row: dict[str, Any] = {"input_ids": packed.input_ids}
        if self._text.has_labels:
            row["labels"] = packed.labels
        if self._text.chosen:
            row["packed_pair_lengths"] = packed.pair_lengths
            self._counts.row_tokens[len(packed.input_ids)] += 1
        else:
            row["lengths"] = packed.lengths
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._writer.write(row)
        self._counts.samples += 1
