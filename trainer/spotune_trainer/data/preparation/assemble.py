"""Joins complete parts into one dataset: renumbers the shards, and writes index and manifest."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spotune_trainer.data.counts.split_counts import PartSummary, SplitCounts
from spotune_trainer.data.manifests import INDEX, MANIFEST
from spotune_trainer.data.preparation.inputs import part_name
from spotune_trainer.data.preparation.lengths import length_histogram
from spotune_trainer.data.rows.packing import padding_share
from spotune_trainer.files import write_json, write_text

_QUANTILES = (0.5, 0.9, 0.99)
_MICRO_BATCH_SIZE = 8
"""Rows of the micro-batches that padding is counted for. The plan, which chooses their size, needs the model."""


def shard_name(number: int) -> str:
    """The file name of a dataset's shard, counted from 0."""
    return f"shard.{number:05d}.mds"


def assemble_dataset(
    staged: Path, summaries: Sequence[PartSummary], folders: Mapping[str, str], manifest: Mapping[str, Any]
) -> Path:
    """Join the parts in ``staged`` into one dataset, and return its folder in there. May be killed, and run again.

    Args:
        staged: Staging folder with the parts. Shards that are not there are listed only.
        summaries: Of all parts, in order.
        folders: Folder of each split, relative to the dataset.
        manifest: Content of ``manifest.json``.
    """
    final = staged / "final"
    for split, folder in folders.items():
        target = final / folder
        target.mkdir(parents=True, exist_ok=True)
        index = []
        for number, (source, shard) in enumerate(_staged_shards(staged, summaries, split)):
            name = shard_name(number)
            if source.exists():  # otherwise an earlier, killed run has moved it, or it is in a store
                source.rename(target / name)
            index.append(shard | {"raw_data": shard["raw_data"] | {"basename": name}})
        write_text(target / INDEX, json.dumps({"version": 2, "shards": index}, sort_keys=True))
    write_json(final / MANIFEST, manifest)
    return final


def statistics(counts: SplitCounts) -> dict[str, Any]:
    """The counts of a split in the format of the manifest: what is trained on, and what is left out."""
    chats: dict[str, Any] = {}
    if counts.turns:
        chats = {"turns": dict(sorted(counts.turns.items())), "reasoningRemoved": counts.reasoning_removed}
    if counts.turn_tokens:
        chats["turnTokens"] = dict(sorted(counts.turn_tokens.items()))
    left_out: dict[str, Any] = {}
    if counts.left_out:
        left_out["leftOut"] = {
            reason: {"rows": rows, "tokens": counts.left_out_tokens[reason]}
            for reason, rows in sorted(counts.left_out.items())
        }
    if counts.problems:
        left_out["problems"] = counts.problems
    return {
        "documents": counts.documents,
        "samples": counts.samples,
        "tokens": counts.tokens,
        "lossTokens": counts.loss_tokens,
        "truncated": counts.truncated,
        "dropped": counts.dropped,
        "cutTokens": counts.cut_tokens,
        "cutLossTokens": counts.cut_loss_tokens,
        "droppedTokens": counts.dropped_tokens,
        "shards": len(counts.shards),
        "bytes": sum(shard["raw_data"]["bytes"] for shard in counts.shards),
        "inputTokens": _quantiles(counts.lengths),
        "inputLengths": {str(bound): rows for bound, rows in length_histogram(counts.lengths).items()},
        **left_out,
        **chats,
        **_packed_pairs(counts),
    }


def _packed_pairs(counts: SplitCounts) -> dict[str, Any]:
    """The number of pairs, and the share of padding that is left in packed rows; empty for other rows."""
    if not counts.pair_tokens:
        return {}
    shares = {"padding": counts.row_tokens, "unpackedPadding": counts.pair_tokens}
    return {
        "pairs": counts.pair_tokens.total(),
        **{name: round(padding_share(lengths, _MICRO_BATCH_SIZE), 4) for name, lengths in shares.items()},
    }


def _staged_shards(staged: Path, summaries: Sequence[PartSummary], split: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for number, summary in enumerate(summaries):
        for shard in summary.splits[split].shards:
            yield staged / part_name(number) / split / shard["raw_data"]["basename"], shard


def _quantiles(lengths: Counter[int]) -> dict[str, float]:
    """Mean, quantiles (nearest-rank method) and maximum of the documents' lengths in tokens, before truncation."""
    documents = lengths.total()
    found: dict[str, float] = {"mean": round(sum(length * count for length, count in lengths.items()) / documents, 2)}
    ordered = sorted(lengths)
    for quantile in _QUANTILES:
        rank, counted = math.ceil(quantile * documents), 0
        for length in ordered:
            counted += lengths[length]
            if counted >= rank:
                found[f"p{quantile * 100:.0f}"] = length
                break
    return found | {"max": ordered[-1]}
