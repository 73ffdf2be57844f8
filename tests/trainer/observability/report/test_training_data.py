"""The part of a report on the training data: counts, lengths, what is left out, and sources of mixtures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.report.page import report_of_directory
from tests.trainer.support.tiny import make_job


def write_manifest(file: Path, *, packing: bool = False, **counts: Any) -> None:
    """The manifest of 100 rows, 4 of which are cut to 48 tokens."""
    train = {"documents": 100, "samples": 99, "tokens": 3000, "lossTokens": 900, "truncated": 4, "dropped": 1}
    text = {"task": "causal", "maxLength": 48, "packing": packing, "text": "body" if packing else ""}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"options": {"text": text}, "splits": {"train": {**train, **counts}, "eval": {}}}))


def facts(page: str, source: str = "") -> dict[str, str]:
    """Titles and values of the split train in the table below a heading: that on the training data, or a source's."""
    heading = f"<h3>{source}</h3>" if source else "<h2>Training data"
    table = page[page.index(heading) :].partition("</table>")[0]
    return dict(re.findall(r'<td class="text">(.*?)</td><td>(.*?)</td>', table))


def prepared_job(directory: JobDirectory) -> JobDirectory:
    """A job that makes its shards of raw rows."""
    job = make_job(
        "/model", "causal", dataset={"train": None, "eval": None, "prepare": {"source": "/rows.jsonl"}, "text": "body"}
    )
    directory.job.write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    return directory


def test_lengths_of_rows_are_shown_with_what_is_cut(tmp_path: Path) -> None:
    directory = prepared_job(JobDirectory(tmp_path))
    write_manifest(directory.data_manifest, cutTokens=1000, inputLengths={"16": 10, "32": 80, "64": 9, "256": 1})
    page = report_of_directory(directory.root)
    assert facts(page) == {
        "maximum length": "48", "rows read": "100", "samples": "99", "tokens": "3,000", "tokens with loss": "900",
        "rows cut": "4 (4.0%)", "tokens cut": "1,000 (25.0%)", "rows left out": "1 (1.0%)",
    }  # fmt: skip
    (chart,) = re.findall(r"<svg[^>]*Rows by length.*?</svg>", page, re.DOTALL)
    bars = {
        bar.findtext("title"): float(bar.get("x", ""))
        for bar in ElementTree.fromstring(chart).iter()
        if bar.tag == "rect"
    }
    assert list(bars) == [
        "9 to 16 tokens: 10 rows, 10.0%", "17 to 32 tokens: 80 rows, 80.0%",
        "33 to 64 tokens: 9 rows, 9.0%", "129 to 256 tokens: 1 rows, 1.0%",
    ]  # fmt: skip
    (limit,) = (float(x) for x in re.findall(r'class="limit" d="M([\d.]+)', chart))
    _, _, bar_of_limit, bar_beyond = bars.values()
    assert bar_of_limit < limit < bar_beyond


def test_packed_text_is_not_cut(tmp_path: Path) -> None:
    directory = prepared_job(JobDirectory(tmp_path))
    write_manifest(directory.data_manifest, packing=True, cutTokens=0, inputLengths={"16": 100})
    page = report_of_directory(directory.root)
    assert facts(page)["samples"] == "99"
    assert 'class="limit"' not in page


def test_packed_pairs_are_counted_with_the_padding_that_is_left(tmp_path: Path) -> None:
    directory = prepared_job(JobDirectory(tmp_path))
    write_manifest(directory.data_manifest, packing=True, pairs=1234, padding=0.021, unpackedPadding=0.4)
    shown = facts(report_of_directory(directory.root))
    assert shown["pairs in packed rows"] == "1,234"
    assert shown["padding in micro-batches of 8 rows"] == "2.1%"
    assert shown["padding without packing"] == "40.0%"


def test_shards_of_earlier_versions_have_counts_without_a_chart(tmp_path: Path) -> None:
    directory = prepared_job(JobDirectory(tmp_path))
    write_manifest(directory.data_manifest)
    page = report_of_directory(directory.root)
    assert facts(page)["rows cut"] == "4 (4.0%)"
    assert "by length in tokens" not in page


@pytest.mark.parametrize("place", ["shards/train", "shards"])
def test_shards_that_were_made_beforehand_have_their_manifest_beside_or_above_them(place: str, tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "job")
    directory.root.mkdir()
    train = {"source": str(tmp_path / "shards/train")}
    directory.job.write_text(make_job("/model", dataset={"train": train}).model_dump_json(by_alias=True))
    write_manifest(tmp_path / place / "manifest.json", inputLengths={"16": 100})
    assert facts(report_of_directory(directory.root))["rows read"] == "100"


def test_what_is_left_out_is_shown_by_reason(tmp_path: Path) -> None:
    directory = prepared_job(JobDirectory(tmp_path))
    write_manifest(
        directory.data_manifest,
        leftOut={"cut": {"rows": 1, "tokens": 48}},
        turns={"trained": 90, "flagged": 3, "notRendered": 2},
        turnTokens={"flagged": 30, "notRendered": 7},
        problems=["/rows.jsonl:7: nothing to learn"],
    )
    page = report_of_directory(directory.root)
    shown = facts(page)
    assert shown["rows left out: nothing to learn within maxLength"] == "1 (48 tokens)"
    assert shown["turns left out: marked by train or weight"] == "3 (30 tokens)"
    assert shown["turns left out: not rendered by the template"] == "2 (7 tokens)"
    assert "train: left out: /rows.jsonl:7: nothing to learn" in page


def test_each_source_of_a_mixture_has_a_table(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "job")
    directory.root.mkdir()
    mixture = [
        {"name": "sql", "prepare": {"source": "/rows.jsonl"}},
        {"name": "chat", "train": {"source": str(tmp_path / "chat")}},
        {"name": "bucket", "train": {"source": "s3://bucket/train"}},
    ]
    dataset = {"train": None, "eval": None, "mixture": mixture, "prompt": "{q}", "completion": "{a}"}
    directory.job.write_text(make_job("/model", dataset=dataset).model_dump_json(by_alias=True, exclude_none=True))
    write_manifest(directory.prepared("sql") / "manifest.json", tokens=5000)
    write_manifest(tmp_path / "chat" / "manifest.json", tokens=7000)
    page = report_of_directory(directory.root)
    assert (facts(page, "sql")["tokens"], facts(page, "chat")["tokens"]) == ("5,000", "7,000")
    assert "<h3>bucket</h3>" not in page


@pytest.mark.parametrize("source", ["s3://bucket/train", "/nowhere/train"])
def test_shards_elsewhere_have_no_part_in_the_report(source: str, tmp_path: Path) -> None:
    job = make_job("/model", dataset={"train": {"source": source}})
    JobDirectory(tmp_path).job.write_text(job.model_dump_json(by_alias=True))
    assert "Training data" not in report_of_directory(tmp_path)
