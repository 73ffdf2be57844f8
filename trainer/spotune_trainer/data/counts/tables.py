"""The counts of a dataset's manifest as a table and as sentences, for the command line, logs and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from spotune_trainer.data.counts.left_out import count_of_splits, describe

Counts = Mapping[str, Any]

SUMMARY: Final = {
    "rows read": "documents",
    "samples": "samples",
    "shards": "shards",
    "tokens": "tokens",
    "tokens with loss": "lossTokens",
    "rows cut": "truncated",
    "tokens cut": "cutTokens",
    "tokens with loss cut": "cutLossTokens",
    "rows left out": "dropped",
    "tokens of rows left out": "droppedTokens",
}
"""Counts that every split has, by their title. Manifests of earlier versions lack some."""
_WHOLES: Final = {
    "truncated": ("documents",),
    "dropped": ("documents",),
    "cutTokens": ("tokens", "cutTokens", "droppedTokens"),
    "cutLossTokens": ("lossTokens", "cutLossTokens"),
}
"""Counts that are shown as a share, and those whose sum is the whole."""
_ROWS: Final = {
    "cut": "rows left out: nothing to learn within maxLength",
    "equal": "rows left out: equal answers within maxLength",
    "flagged": "rows left out: marked by train or weight",
    "empty": "rows left out: blank text",
    "turns": "rows left out: no turn to learn",
}
_TURNS: Final = {
    "trained": "turns trained on",
    "flagged": "turns left out: marked by train or weight",
    "earlier": "turns left out: not the last (trainOn)",
    "cut": "turns left out: beyond maxLength",
    "empty": "turns left out: empty",
    "refused": "turns left out: the template refuses the chat",
    "notRendered": "turns left out: not rendered by the template",
    "notPlaced": "turns left out: not told from other text",
}
_PACKED_PAIRS: Final[dict[str, Callable[[Counts], str]]] = {
    "pairs in packed rows": lambda counts: f"{counts['pairs']:,}",
    "pairs in a row, on average": lambda counts: f"{counts['pairs'] / counts['samples']:.1f}",
    "padding in micro-batches of 8 rows": lambda counts: f"{counts['padding']:.1%}",
    "padding without packing": lambda counts: f"{counts['unpackedPadding']:.1%}",
}


def table_rows(splits: Sequence[Counts]) -> Iterator[tuple[str, list[str]]]:
    """The title of each row of the table, and its value for each split of a manifest."""
    for title, name in SUMMARY.items():
        if any(name in counts for counts in splits):
            yield title, [_with_share(counts, name) for counts in splits]
    rows = [counts.get("leftOut", {}) for counts in splits]
    for reason, title in _ROWS.items():
        if any(reason in found for found in rows):
            of_reason = [found.get(reason, {"rows": 0, "tokens": 0}) for found in rows]
            yield title, [_with_tokens(found["rows"], found["tokens"]) for found in of_reason]
    for outcome, title in _TURNS.items():
        if any(outcome in counts.get("turns", {}) for counts in splits):
            yield (
                title,
                [
                    _with_tokens(counts.get("turns", {}).get(outcome, 0), counts.get("turnTokens", {}).get(outcome))
                    for counts in splits
                ],
            )
    if any("pairs" in counts for counts in splits):
        for title, shown in _PACKED_PAIRS.items():
            yield title, [shown(counts) if "pairs" in counts else "" for counts in splits]


def warnings(counts: Counts, max_length: int) -> Iterator[str]:
    """Sentences about what of a split is not learned.

    Args:
        counts: Of the split.
        max_length: Maximum tokens of a row.
    """
    for problem in counts.get("problems", ()):
        yield f"left out: {problem}"
    if counts.get("reasoningRemoved"):
        yield (
            f"the chat template removes the reasoning of {counts['reasoningRemoved']:,} turns that are followed by "
            "others; the model learns their answers without it."
        )
    if counts["truncated"]:
        share = counts["truncated"] / counts["documents"]
        yield (
            f"{share:.1%} of the rows were cut to {max_length} tokens{_longest(counts)}; raise maxLength to keep them "
            "whole."
        )
    if counts["dropped"]:
        reasons = [
            f"{found['rows']:,} {_ROWS[reason].partition(': ')[2]}"
            for reason, found in counts.get("leftOut", {}).items()
        ]
        what = f" ({'; '.join(reasons)})" if reasons else f": no token to learn from within {max_length} tokens"
        yield f"{counts['dropped']:,} rows were left out{what}."


def summary_of(manifest: Mapping[str, Any]) -> str:
    """What a manifest's rows became, in one sentence."""
    splits = manifest["splits"].values()

    def total(name: str) -> int:
        return sum(counts.get(name, 0) for counts in splits)

    text = (
        f"{total('documents'):,} rows read, {total('samples'):,} samples with {total('tokens'):,} tokens written, "
        f"{total('lossTokens'):,} tokens trained on"
    )
    if total("truncated"):
        text += f"; {total('truncated'):,} rows cut to maxLength, by {total('cutTokens'):,} tokens"
        text += f" ({total('cutLossTokens'):,} of them to learn)"
    return "; ".join([text, *([left_out] if (left_out := left_out_of(manifest)) else [])])


def left_out_of(manifest: Mapping[str, Any]) -> str:
    """What of a manifest's rows is left out although the job asks for it; empty if nothing is."""
    counts = count_of_splits(manifest["splits"].values())
    return f"{describe(counts)} left out, see `problems` in the manifest" if counts else ""


def _with_share(counts: Counts, name: str) -> str:
    """A count, with its share if it says what is cut."""
    count, wholes = counts.get(name, 0), _WHOLES.get(name)
    share = f" ({count / max(sum(counts.get(each, 0) for each in wholes), 1):.1%})" if wholes and count else ""
    return f"{count:,}{share}"


def _longest(counts: Counts) -> str:
    return f" (99 % have at most {counts['inputTokens']['p99']})" if "inputTokens" in counts else ""


def _with_tokens(count: int, tokens: int | None) -> str:
    return f"{count:,}" if tokens is None else f"{count:,} ({tokens:,} tokens)"
