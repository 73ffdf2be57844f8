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
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from spotune.errors import JobError
from spotune.prompting.template import RowError
from spotune_trainer.data.counts.left_out import MAX_PROBLEMS, LeftOutError, check_left_out
from spotune_trainer.data.counts.split_counts import PartSummary, SplitCounts
from spotune_trainer.data.manifests import INDEX
from spotune_trainer.data.preparation.inputs import Part
from spotune_trainer.data.preparation.outcome import RowOutcome, loss_tokens, outcome_of
from spotune_trainer.data.preparation.raw_files import FileRange
from spotune_trainer.data.preparation.readers import RawRow, read_rows
from spotune_trainer.data.rows.documents import Document, TokenizedDocument
from spotune_trainer.data.rows.labelled_answers import with_mismatched
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.packing import PackedRow, Packer
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from spotune_trainer.files import fsync_directory, fsync_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "eval")
SHARD_HASH = "xxh3_64"
SUMMARY = "part.json"
_TOKENIZER_BATCH = 256  # documents per tokenizer call, to amortize its overhead


@dataclass(frozen=True)
class PartOptions:
    """How a part is written.

    Attributes:
        text: How rows become text and tokens.
        eval_fraction: Fraction of the documents that go into the split ``eval``, chosen by a hash of their text.
        eval_seed: Seed of that hash.
        shard_size: Maximum bytes per shard.
        max_skipped: Maximum rows, and assistant turns of chats, that may be left out.
    """

    text: TextOptions
    eval_fraction: float = 0.0
    eval_seed: int = 42
    shard_size: int = 1 << 25
    max_skipped: int = 0


@dataclass(frozen=True)
class TokenizedRow:
    """A row with its tokens.

    Attributes:
        document: The rendered row.
        tokens: Its tokens.
        outcome: What of it is written, and why the rest is not.
        problems: The outcome's problems with file and line.
        turn_tokens: Tokens of the turns of a chat that are not trained on, by outcome.
    """

    document: Document
    tokens: TokenizedDocument
    outcome: RowOutcome
    problems: Sequence[str]
    turn_tokens: Counter[str]


def raise_error(error: JobError) -> None:
    """Raise the error of a row."""
    raise error


def read_summary(folder: Path) -> PartSummary | None:
    """The summary of a complete part; None if the part is not complete."""
    try:
        content = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return PartSummary({name: SplitCounts.from_json(split) for name, split in content.items()})


def write_part(folder: Path, part: Part, options: PartOptions, tokenizer: PreTrainedTokenizerBase) -> PartSummary:
    """Tokenize a part into ``folder/train`` and ``folder/eval``. Does nothing if the part is complete.

    Raises:
        JobError: A row cannot be read or rendered, or more is left out than is allowed. The message names file and
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
        refuse: Called with the error of a row that cannot be rendered, and with a LeftOutError for each row with
            which more is left out than is allowed; the error names file and line. If it returns, the row is left out.

    Raises:
        JobError: A file is damaged or malformed; the message names file and line.
        InfrastructureError: A store did not send its file.
    """
    document_tokenizer = DocumentTokenizer(options.text, tokenizer)
    documents = _render_rows(part, RowRenderer(options.text, tokenizer), max_rows, refuse)
    last: list[Document] = []
    left_out: Counter[str] = Counter()
    while chunk := list(islice(documents, _TOKENIZER_BATCH)):
        rendered = [document for document, _ in chunk]
        if options.text.has_labelled_answers:
            rendered, last = with_mismatched(rendered, last), rendered[-1:]
        tokenized = document_tokenizer.tokenize(rendered)
        turn_tokens = document_tokenizer.count_turn_tokens(rendered)
        for document, (_, place), tokens, of_turns in zip(rendered, chunk, tokenized, turn_tokens, strict=True):
            outcome = outcome_of(document, tokens, options.text)
            problems = [f"{place()}: {problem}" for problem in outcome.problems]
            left_out.update(outcome.left_out)
            if problems and left_out.total() > options.max_skipped:
                refuse(LeftOutError(problems, left_out, options.max_skipped, outcome.left_out))
            else:
                yield TokenizedRow(document, tokens, outcome, problems, of_turns)


def _write_documents(
    part: Part, options: PartOptions, tokenizer: PreTrainedTokenizerBase, writers: dict[str, _SplitWriter]
) -> None:
    """Write the rows of a part.

    Raises:
        JobError: A row cannot be read or rendered. Or more is left out than is allowed: the error names the first
            problems of the part, since who corrects one wants to know the others.
    """
    problems: list[str] = []
    exceeded: list[Counter[str]] = []

    def refuse(error: JobError) -> None:
        if not isinstance(error, LeftOutError):
            raise error
        problems.extend(error.left_out)
        exceeded.append(error.counts)
        if len(problems) >= MAX_PROBLEMS:
            check_left_out(problems, error.counts, options.max_skipped)

    for row in tokenize_part(part, options, tokenizer, refuse=refuse):
        problems.extend(row.problems)
        writers[_assign_split(row.document, options)].add(row)
    if exceeded:
        check_left_out(problems, exceeded[-1], options.max_skipped)


def _read_part(part: Part, renderer: RowRenderer) -> Iterator[tuple[FileRange, int, RawRow]]:
    for file_range in part:
        for number, row in read_rows(file_range, renderer.columns):
            yield file_range, number, row


def _render_rows(
    part: Part, renderer: RowRenderer, max_rows: int | None, refuse: Callable[[JobError], None]
) -> Iterator[tuple[Document, Callable[[], str]]]:
    """Each row's document, and a function that returns its file and line."""
    for file_range, number, row in islice(_read_part(part, renderer), max_rows):
        try:
            document = renderer.render(row)
        except RowError as error:
            refused = JobError(f"{file_range.location(number)}: {error}")
            refused.__cause__ = error
            refuse(refused)
            continue
        yield document, partial(file_range.location, number)


def _assign_split(document: Document, options: PartOptions) -> str:
    """The split of a document, by a hash of its text, so that duplicates go into the same split."""
    share = xxhash.xxh3_64_intdigest(document.dedup_key, seed=options.eval_seed) / 2**64
    return "eval" if share < options.eval_fraction else "train"


class _SplitWriter:
    """Writes the rows of one split as MDS shards, and counts them."""

    def __init__(self, folder: Path, options: PartOptions, *, packing: bool) -> None:
        from streaming.base.format.mds import MDSWriter  # imports torch for seconds; `spotune validate` writes nothing

        self._folder = folder
        self._text = options.text
        self._packer = Packer(options.text.row_length) if options.text.packing and packing else None
        self._counts = SplitCounts()
        self._writer = MDSWriter(
            out=str(folder), columns=self._columns(), hashes=[SHARD_HASH], size_limit=options.shard_size
        )

    def add(self, row: TokenizedRow) -> None:
        counts, document, tokens = self._counts, row.document, row.tokens
        counts.documents += 1
        counts.truncated += tokens.truncated
        counts.lengths[tokens.limited_length] += 1
        counts.cut_tokens += tokens.full_length - len(tokens.input_ids)
        counts.cut_loss_tokens += tokens.cut_loss_tokens
        counts.problems += row.problems[: MAX_PROBLEMS - len(counts.problems)]
        if document.chat is not None:
            counts.turns.update(document.chat.outcomes.values())
            counts.turns += Counter(cut=tokens.cut_turns)
            counts.turns -= Counter(trained=tokens.cut_turns)
            counts.turn_tokens += row.turn_tokens
            counts.reasoning_removed += document.chat.reasoning_removed
        reason = row.outcome.reason
        if reason is not None:
            counts.dropped += 1
            counts.dropped_tokens += len(tokens.input_ids)
            counts.left_out[reason] += 1
            counts.left_out_tokens[reason] += len(tokens.input_ids)
        for piece in row.outcome.pieces:
            counts.loss_tokens += loss_tokens(piece, self._text)
            counts.tokens += len(piece.input_ids)
            if self._packer is None:
                self._write(self._row(document, piece))
            else:
                if piece.pair_lengths is not None:
                    counts.pair_tokens[len(piece.input_ids)] += 1
                for packed in self._packer.add(piece):
                    self._write_packed(packed)

    def finish(self) -> SplitCounts:
        if self._packer is not None:
            for row in self._packer.flush():
                self._write_packed(row)
        if self._writer.new_samples:
            self._writer.flush_shard()
            self._writer._reset_cache()
        self._writer.executor.submit(int).result()  # finish() sleeps for a second if its pool has not begun all tasks
        self._writer.finish()
        index = self._folder / INDEX
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
