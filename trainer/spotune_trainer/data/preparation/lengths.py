"""Lengths of rows in tokens, and what maximum lengths would cut."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from spotune.errors import JobError, UsageError
from spotune.prompting.template import RowError
from spotune_trainer.data.batches import NO_LOSS
from spotune_trainer.data.counts.left_out import MAX_PROBLEMS
from spotune_trainer.data.preparation.inputs import RawInput, rows_in_order
from spotune_trainer.data.preparation.outcome import outcome_of
from spotune_trainer.data.rows.documents import Document
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.pairs import split_pair
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_BATCH: Final = 256
_WITHOUT_LIMIT: Final = 1 << 40
_PERCENTILES: Final = (50, 90, 95, 99)
_LIMITS: Final = tuple(2**power for power in range(7, 18))

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CutAtLimit:
    """What a maximum length cuts.

    Attributes:
        limit: The maximum length in tokens.
        rows: Rows that are longer.
        tokens: Tokens beyond it.
        trained_tokens: Those of them with loss.
    """

    limit: int
    rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class LengthSummary:
    """The lengths of all rows, or of all targets of a seq2seq model.

    Attributes:
        limit: The maximum length of the job; None if nothing is cut.
        tokens: All tokens.
        trained_tokens: Those of them with loss.
        mean: Mean length.
        percentiles: The length that so many percent of the rows do not exceed; ``max`` is the longest.
        histogram: Rows by the upper bound of their length, a power of two; the lower bound is the next smaller one.
        cuts: What maximum lengths cut: that of the job, and powers of two, up to the first one that cuts nothing.
    """

    limit: int | None
    tokens: int
    trained_tokens: int
    mean: float
    percentiles: dict[str, int]
    histogram: dict[int, int]
    cuts: tuple[CutAtLimit, ...]


@dataclass(frozen=True)
class DatasetLengths:
    """Lengths of a dataset. The length of a pair is that of its longer document, which the maximum length limits.

    Attributes:
        rows: Rows that were read.
        duplicates: Rows whose text equals that of a row before.
        input: The rows; of a seq2seq model the inputs.
        target: The targets of a seq2seq model; None for others.
    """

    rows: int
    duplicates: int
    input: LengthSummary
    target: LengthSummary | None


@dataclass(frozen=True)
class SourceLengths:
    """Lengths of a dataset with several sources: of each by its name, and of all together."""

    by_source: dict[str, DatasetLengths]
    total: DatasetLengths


@dataclass(frozen=True)
class RowLengths:
    """The length of every row.

    Attributes:
        rows: Rows that were read.
        texts: A hash of each different text.
        input: The rows; of a seq2seq model the inputs.
        target: The targets of a seq2seq model; None for others.
        left_out: Turns and rows that cannot be trained on at any length, by reason, see `count_left_out`.
        problems: File, line and reason of the first of them.
    """

    rows: int
    texts: frozenset[bytes]
    input: Collected
    target: Collected | None
    left_out: Counter[str]
    problems: tuple[str, ...]

    @property
    def duplicates(self) -> int:
        """Rows whose text equals that of a row before."""
        return self.rows - len(self.texts)

    def summary(self) -> DatasetLengths:
        """The summary of all rows."""
        target = self.target.summary() if self.target is not None else None
        return DatasetLengths(self.rows, self.duplicates, self.input.summary(), target)

    def joined(self, other: RowLengths) -> RowLengths:
        """The lengths of these rows and those of another source, which has the same limits."""
        target = self.target
        if target is not None and other.target is not None:
            target = target.joined(other.target)
        return RowLengths(
            self.rows + other.rows,
            self.texts | other.texts,
            self.input.joined(other.input),
            target,
            self.left_out + other.left_out,
            (self.problems + other.problems)[:MAX_PROBLEMS],
        )


def measure_lengths(
    inputs: Sequence[RawInput],
    options: TextOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int | None = None,
    report: Callable[[int], None] = lambda _rows: None,
) -> DatasetLengths:
    """Tokenize rows without cutting them, and summarize their lengths. See `collect_lengths`."""
    return collect_lengths(inputs, options, tokenizer, max_rows=max_rows, report=report).summary()


def measure_sources(
    sources: Mapping[str, Sequence[RawInput]],
    options: TextOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int | None = None,
    report: Callable[[int], None] = lambda _rows: None,
) -> SourceLengths:
    """As `measure_lengths`, of each source by its name and of all together.

    Args:
        sources: Files, folders or patterns by name; at least one.
        options: See `collect_lengths`.
        tokenizer: The tokenizer.
        max_rows: Read so many rows of each source; None reads all.
        report: Called with the number of rows of all sources that were read.
    """
    found: dict[str, RowLengths] = {}
    for name, inputs in sources.items():
        before = sum(each.rows for each in found.values())

        def report_all(rows: int, before: int = before) -> None:
            report(before + rows)

        found[name] = collect_lengths(inputs, options, tokenizer, max_rows=max_rows, report=report_all)
    return SourceLengths(
        {name: each.summary() for name, each in found.items()}, reduce(RowLengths.joined, found.values()).summary()
    )


def collect_lengths(
    inputs: Sequence[RawInput],
    options: TextOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int | None = None,
    report: Callable[[int], None] = lambda _rows: None,
) -> RowLengths:
    """Tokenize rows without cutting them, and collect their lengths.

    Args:
        inputs: Files, folders or patterns.
        options: How rows become text; its maximum lengths are those of the job.
        tokenizer: The tokenizer.
        max_rows: Read so many rows from the start; None reads all.
        report: Called with the number of rows that were read, after each batch of them.

    Raises:
        UsageError: There is no row.
        JobError: A file or row is wrong, or the options contradict each other. The message names file and line.
    """
    whole = dataclasses.replace(
        options, max_length=_WITHOUT_LIMIT, max_completion_length=_WITHOUT_LIMIT if options.task == "seq2seq" else 0
    )
    try:
        renderer, encoder = RowRenderer(whole, tokenizer), DocumentTokenizer(whole, tokenizer)
    except ValueError as error:
        raise JobError(f"spec.dataset: {error}") from error
    packed_text = options.packing and bool(options.text)
    rows = Collected(None if packed_text else options.max_length)
    targets = Collected(options.max_completion_length or options.max_length)
    texts: set[bytes] = set()
    problems: list[str] = []
    left_out: Counter[str] = Counter()
    count = 0
    located = islice(_documents(inputs, renderer), max_rows)
    while batch := list(islice(located, _TOKENIZER_BATCH)):
        texts.update(hashlib.blake2b(document.dedup_key, digest_size=16).digest() for _, document in batch)
        for (place, document), tokens in zip(batch, encoder.tokenize([each for _, each in batch]), strict=True):
            if options.task == "seq2seq":
                rows.add(np.zeros(len(tokens.input_ids), dtype=bool))
                targets.add(np.ones(len(tokens.labels), dtype=bool))
            elif options.has_labelled_texts and not options.label_each_word:
                rows.add(np.zeros(len(tokens.input_ids), dtype=bool))
            else:
                longest = max(split_pair(tokens), key=lambda answer: len(answer.input_ids))
                rows.add(longest.labels != NO_LOSS)
            outcome = outcome_of(document, tokens, whole)
            problems += [f"{place()}: {problem}" for problem in outcome.problems[: MAX_PROBLEMS - len(problems)]]
            left_out += outcome.left_out
        count += len(batch)
        report(count)
    if not count:
        raise UsageError("the input has no rows")
    target = targets if options.task == "seq2seq" else None
    return RowLengths(count, frozenset(texts), rows, target, left_out, tuple(problems))


def length_histogram(lengths: Mapping[int, int]) -> dict[int, int]:
    """Rows by the upper bound of their length, a power of two; the lower bound is the next smaller one.

    Args:
        lengths: Number of rows by length in tokens.
    """
    bars: Counter[int] = Counter()
    for length, rows in lengths.items():
        bars[1 << (length - 1).bit_length() if length > 1 else 1] += rows
    return dict(sorted(bars.items()))


def _documents(inputs: Sequence[RawInput], renderer: RowRenderer) -> Iterator[tuple[Callable[[], str], Document]]:
    """Each row's document, and a function that returns its file and line."""
    for file_range, line, row in rows_in_order(inputs, renderer.columns):
        try:
            yield partial(file_range.location, line), renderer.render(row)
        except RowError as error:
            raise JobError(f"{file_range.location(line)}: {error}") from error


class Collected:
    """Lengths, and the tokens with loss within each of the limits.

    Args:
        limit: The job's maximum length; None if nothing is cut.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._limits = np.array(sorted({*_LIMITS, *([limit] if limit else [])}), dtype=np.int64)
        self._lengths: list[int] = []
        self._untrained: list[int] = []
        self._trained = 0
        self._trained_within = np.zeros(len(self._limits), dtype=np.int64)

    def add(self, has_loss: npt.NDArray[np.bool_]) -> None:
        """Add a row by whether its tokens have loss, ``[tokens]``."""
        self._lengths.append(len(has_loss))
        trained = np.flatnonzero(has_loss[1:])  # no token precedes the first one, so it is not predicted
        self._untrained.append(int(trained[0]) + 1 if len(trained) else len(has_loss))
        before = np.concatenate([[0], np.cumsum(has_loss)])
        self._trained += int(before[-1])
        self._trained_within += before[np.minimum(self._limits, len(has_loss))]

    def joined(self, other: Collected) -> Collected:
        """The lengths of both, which have the same limit."""
        assert self._limit == other._limit
        both = Collected(self._limit)
        both._lengths, both._untrained = self._lengths + other._lengths, self._untrained + other._untrained
        both._trained, both._trained_within = (
            self._trained + other._trained,
            self._trained_within + other._trained_within,
        )
        return both

    @property
    def rows_by_length(self) -> Counter[int]:
        """The number of rows of each length in tokens."""
        return Counter(self._lengths)

    @property
    def rows_by_untrained_start(self) -> Counter[int]:
        """The number of rows by the tokens before the first one that is trained. A shorter row has nothing to learn."""
        return Counter(self._untrained)

    def summary(self) -> LengthSummary:
        """The summary of all rows."""
        lengths = np.array(self._lengths, dtype=np.int64)
        percentiles = {
            f"p{percent}": int(np.percentile(lengths, percent, method="inverted_cdf")) for percent in _PERCENTILES
        }
        return LengthSummary(
            limit=self._limit,
            tokens=int(lengths.sum()),
            trained_tokens=self._trained,
            mean=round(float(lengths.mean()), 1),
            percentiles=percentiles | {"max": int(lengths.max())},
            histogram=length_histogram(self.rows_by_length),
            cuts=tuple(self._cuts(lengths)),
        )

    def _cuts(self, lengths: Lengths) -> Iterator[CutAtLimit]:
        for limit, trained_within in zip(self._limits.tolist(), self._trained_within.tolist(), strict=True):
            excess = np.maximum(lengths - limit, 0)
            cut = CutAtLimit(limit, int(np.count_nonzero(excess)), int(excess.sum()), self._trained - trained_within)
            yield cut
            if not cut.rows and limit >= (self._limit or 0):
                return
