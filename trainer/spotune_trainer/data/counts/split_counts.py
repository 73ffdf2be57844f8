"""The counts of one split of a dataset, summed over the parts that write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from spotune_trainer.data.counts.left_out import MAX_PROBLEMS


@dataclass
class SplitCounts:
    """Counts of one split. The field names are keys of ``part.json``.

    Attributes:
        documents: Raw rows read.
        samples: Rows written to shards; with packing fewer than documents.
        tokens: Input tokens written.
        loss_tokens: Labels that carry loss.
        truncated: Documents that were truncated.
        dropped: Documents that are left out whole; see `left_out`.
        cut_tokens: Input tokens beyond the maximum length.
        cut_loss_tokens: Labels with loss beyond the maximum length, also of seq2seq targets.
        dropped_tokens: Input tokens, within the maximum length, of dropped documents.
        left_out: Dropped documents by `RowReason`.
        left_out_tokens: Their `dropped_tokens` by reason.
        turns: Assistant turns of chats by outcome: see `TurnOutcome`; ``cut`` are turns beyond the maximum length.
        turn_tokens: Tokens of the turns that are not trained on, by outcome: of what the row says in them, without what
            the chat template adds.
        reasoning_removed: Trained turns whose reasoning the chat template removes.
        problems: The first turns and rows that are left out although the job asks for them: file, line and reason.
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
    cut_loss_tokens: int = 0
    dropped_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    left_out_tokens: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    turn_tokens: Counter[str] = field(default_factory=Counter)
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
        del self.problems[MAX_PROBLEMS:]

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> SplitCounts:
        """The counts that `vars` of these wrote as JSON, whose keys are text."""
        counts = SplitCounts(**content)
        for name in ("left_out", "left_out_tokens", "turns", "turn_tokens"):
            setattr(counts, name, Counter(getattr(counts, name)))
        for name in ("lengths", "pair_tokens", "row_tokens"):
            setattr(counts, name, Counter({int(length): count for length, count in getattr(counts, name).items()}))
        return counts


@dataclass
class PartSummary:
    """What was written for one part: counts by split."""

    splits: dict[str, SplitCounts]
