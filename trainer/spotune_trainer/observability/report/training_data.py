"""What a report says about the training data: the counts of each source's manifest, and the lengths of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune_trainer.data.counts.tables import table_rows, warnings
from spotune_trainer.observability.report.charts import length_chart


@dataclass(frozen=True)
class DataSection:
    """The section of one source.

    Attributes:
        source: Its name in a mixture; empty without a mixture.
        splits: Names of the columns.
        rows: Title, and value for each split, of each row of the table of `spotune shard`.
        remarks: Sentences about what is not learned.
        lengths: The chart of lengths, as SVG; empty for shards whose manifest has none, as those of earlier versions.
    """

    source: str
    splits: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    remarks: Sequence[str]
    lengths: str


def data_sections(manifests: Mapping[str, Mapping[str, Any]]) -> Iterator[DataSection]:
    """The section of each source with counts, by its name."""
    for source, manifest in manifests.items():
        splits = {name: counts for name, counts in manifest["splits"].items() if counts.get("documents")}
        if not splits:
            continue
        text = manifest["options"]["text"]
        yield DataSection(
            source,
            list(splits),
            [("maximum length", [f"{text['maxLength']:,}"] * len(splits)), *table_rows(list(splits.values()))],
            [f"{name}: {remark}" for name, counts in splits.items() for remark in warnings(counts, text["maxLength"])],
            _lengths(manifest),
        )


def _lengths(manifest: Mapping[str, Any]) -> str:
    rows = manifest["splits"].get("train", {}).get("inputLengths", {})
    if not rows:
        return ""
    text = manifest["options"]["text"]
    limit = None if text["packing"] and text["text"] else text["maxLength"]
    what = "Inputs" if text["task"] == "seq2seq" else "Rows"
    cut = "" if limit is None else f"; the line is the maximum length, {limit:,}"
    return length_chart(
        f"{what} by length in tokens, before they are cut{cut}", {int(k): n for k, n in rows.items()}, limit
    )
