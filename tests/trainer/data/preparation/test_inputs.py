"""Which files are read, how they are split into parts, and the errors for broken files."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet
from transformers import PreTrainedTokenizerBase

from spotune.errors import JobError
from spotune_trainer.data.preparation.inputs import find_inputs, split_into_parts
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.preparation.readers import read_rows
from spotune_trainer.data.rows.options import TextOptions

Rows = list[dict[str, Any]]
COLUMNS = frozenset({"q", "a"})
ROWS: Rows = [{"q": f"question {n}\nof two lines, ümlaut", "a": str(n)} for n in range(40)]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


def write(path: Path, rows: Rows) -> Path:
    name = path.stem if path.suffix in COMPRESS else path.name
    if name.endswith(".arrow"):
        table = pyarrow.Table.from_pylist(rows)
        new = ipc.new_stream if "stream" in name else ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return path
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return path
    if name.endswith(".csv"):
        lines = path.with_suffix(".tmp")
        with lines.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        content = lines.read_bytes()
        lines.unlink()
    else:
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(COMPRESS[path.suffix](content) if path.suffix in COMPRESS else content)
    return path


def read(*sources: Path | str, part_size: int = 1 << 20) -> tuple[Rows, int]:
    parts = split_into_parts(find_inputs(sources), COLUMNS, part_size)
    return [row for part in parts for file_range in part for _, row in read_rows(file_range, COLUMNS)], len(parts)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "stream.arrow", "a.jsonl.gz", "a.csv.gz"]
    + [f"a.{kind}{suffix}" for kind in ("jsonl", "csv") for suffix in (".bz2", ".xz", ".zst")],
)
@pytest.mark.parametrize("part_size", [1, 300, 1 << 20])
def test_every_row_is_read_once_for_any_part_size(tmp_path: Path, name: str, part_size: int) -> None:
    rows, parts = read(write(tmp_path / name, ROWS), part_size=part_size)
    assert rows == ROWS
    splittable = name in {"a.jsonl", "a.json", "a.parquet"}
    assert (parts > 1) == (splittable and part_size < 1000)


def test_small_files_share_a_part(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"{number:02d}.jsonl", ROWS[number : number + 1])
    rows, parts = read(tmp_path, part_size=300)
    assert rows == ROWS[:20]
    assert 1 < parts < 10


def test_overlapping_sources_give_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.jsonl", "1.jsonl", "b/.hidden.jsonl"):
        write(tmp_path / name, ROWS[:1])
    (tmp_path / "README.md").write_text("notes")
    found = find_inputs([tmp_path, str(tmp_path / "**/*.jsonl"), tmp_path / "1.jsonl"])
    assert [file.path.name for file in found] == ["1.jsonl", "2.jsonl"]


def test_byte_order_marks_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": '{"q": "x", "a": "y"}\n\n \n', "a.csv": "q,a\n\nx,y\n\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert read(tmp_path / name)[0] == [{"q": "x", "a": "y"}]


def broken_parquet(path: Path) -> None:
    write(path, ROWS)
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)


def cut_short(count: int) -> Callable[[Path], None]:
    def broken(path: Path) -> None:
        path.write_bytes(write(path, ROWS).read_bytes()[:-count])

    return broken


GOOD = '{"q": "x", "a": "y"}\n'
BROKEN: dict[str, tuple[str, str | bytes | Callable[[Path], Any], str]] = {
    "invalid JSON": ("a.jsonl", GOOD * 2 + '{"q": "x"\n' + GOOD, r"a\.jsonl:3: invalid JSON at column"),
    "a JSON array": ("a.json", '[{"q": 1}, \n', r"a\.json:1: invalid JSON .*one object per line"),
    "a row that is a list": ("a.jsonl", GOOD + "[1]\n", r"a\.jsonl:2: a line must hold one JSON object .* not a list"),
    "not UTF-8": ("a.jsonl", GOOD.encode() * 3 + b'{"q": "\xff"}\n', r"a\.jsonl:4: not UTF-8"),
    "a lone surrogate": ("a.jsonl", GOOD + r'{"q": "\ud800", "a": "y"}' + "\n", r"a\.jsonl:2: .*UTF-8"),
    "a missing column": (
        "a.jsonl",
        GOOD + '{"q": "x"}\n',
        r"a\.jsonl:2: no column 'a'; the row has 'q': .*dataset\.completion",
    ),
    "a null": (
        "a.jsonl",
        GOOD + '{"q": null, "a": ""}\n',
        r"a\.jsonl:2: column 'q' is null, not text: .*dataset\.prompt",
    ),
    "an empty completion": (
        "a.jsonl",
        GOOD + '{"q": "x", "a": " "}\n',
        r"a\.jsonl:2: the completion is empty: remove the row, or correct it or dataset\.completion",
    ),
    "mixed types": ("a.jsonl", GOOD + '{"q": ["x"], "a": ""}\n', r"a\.jsonl:2: column 'q' is a list"),
    "no rows": ("a.jsonl", "", r"no rows: .*a\.jsonl"),
    "a header alone": ("a.csv", "q,a\n", r"no rows: .*a\.csv"),
    "a missing CSV column": ("a.csv", "q,b\nx,y\n", r"a\.csv:1: no column 'a'; the file has 'q', 'b': correct"),
    "a CSV row too long": (
        "a.csv",
        "q,a\nx,y\nx,y,z\n",
        r"a\.csv:3: 3 fields, but the header names 2 columns: correct the row",
    ),
    "an open quote": ("a.csv", 'q,a\nx,y\n"x,y\n', r"a\.csv:3: invalid CSV"),
    "CSV that is not UTF-8": ("a.csv", b"q,a\nx,y\n\xff,y\n", r"a\.csv:3: not UTF-8"),
    "a duplicate column": ("a.csv", "q,a,q\n", r"a\.csv:1: two columns have the same name"),
    "not Parquet": ("a.parquet", "text", r"a\.parquet is not a Parquet file"),
    "damaged Parquet": ("a.parquet", broken_parquet, r"a\.parquet is damaged"),
    "a truncated gzip": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 50)[:-12], r"a\.jsonl\.gz is not a complete gzip"),
    "not gzip": ("a.csv.gz", "q,a\n", r"a\.csv\.gz is not a complete gzip"),
    "a truncated bzip2": (
        "a.jsonl.bz2",
        bz2.compress(GOOD.encode() * 50)[:-12],
        r"a\.jsonl\.bz2 is not a complete bzip2",
    ),
    "a truncated xz": ("a.csv.xz", lzma.compress(b"q,a\n" + b"x,y\n" * 50)[:-12], r"a\.csv\.xz is not a complete xz"),
    "not xz": ("a.jsonl.xz", GOOD, r"a\.jsonl\.xz is not a complete xz"),
    "a truncated Zstandard": (
        "a.jsonl.zst",
        COMPRESS[".zst"](GOOD.encode() * 50)[:-5],
        r"a\.jsonl\.zst is not a complete Zstandard file: .*copy it again",
    ),
    "a line cut short": ("a.jsonl", GOOD + '{"q": "x", "a', r"a\.jsonl:2: invalid JSON .*cut short, copy it again"),
    "a truncated Arrow file": ("a.arrow", cut_short(30), r"a\.arrow is not an Arrow file, or damaged"),
    "a truncated Arrow stream": ("stream.arrow", cut_short(8), r"stream\.arrow is not a complete Arrow file or stream"),
    "not Arrow": ("a.arrow", "text", r"a\.arrow is not a complete Arrow file or stream"),
    "an empty Arrow file": ("a.arrow", "", r"a\.arrow is not a complete Arrow file or stream"),
    "a truncated Parquet": ("a.parquet", cut_short(9), r"a\.parquet is not a Parquet file, or damaged"),
    "Latin-1 among UTF-8": (
        "a.jsonl",
        GOOD.encode() + '{"q": "ä", "a": "y"}\n'.encode("latin-1"),
        r"a\.jsonl:2: not UTF-8",
    ),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), r"a\.jsonl:1: not UTF-8 text .*convert the file to UTF-8"),
    "compressed Parquet": ("a.parquet.gz", "", r"a\.parquet\.gz has an unknown format"),
    "an unknown format": ("a.xlsx", "", r"a\.xlsx has an unknown format"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_error_names_broken_data_and_leaves_no_files_behind(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, case: str
) -> None:
    name, content, message = BROKEN[case]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    options = PrepareOptions(TextOptions("causal", "{q}", "{a}"), processes=1, part_size=30)
    with pytest.raises(JobError, match=message) as caught:
        prepare([path], tmp_path / "out", options, tokenizer)
    assert "\n" not in str(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_line_numbers_are_right_in_later_parts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 500 + '{"q": 1}\n')
    options = PrepareOptions(TextOptions("causal", "{q}", "{a}"), processes=1, part_size=1000)
    with pytest.raises(JobError, match=r"a\.jsonl:501: no column 'a'"):
        prepare([path], tmp_path / "out", options, tokenizer)
    write(tmp_path / "b.parquet", [*ROWS, {"q": "x", "a": None}])
    with pytest.raises(JobError, match=r"b\.parquet, row 41: column 'a' is null"):
        prepare([tmp_path / "b.parquet"], tmp_path / "out", options, tokenizer)


def test_files_with_different_columns_or_types_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", [{"q": "x", "a": "y"}])
    write(tmp_path / "2.csv", [{"question": "x", "a": "y"}])
    with pytest.raises(JobError, match=r"2\.csv:1: no column 'q'; the file has 'question', 'a'"):
        read(tmp_path / "*.csv")
    write(tmp_path / "1.parquet", [{"q": "x", "a": "y"}])
    write(tmp_path / "2.parquet", [{"q": "x", "a": 1}])
    with pytest.raises(JobError, match=r"2\.parquet: column 'a' is int64, but string in .*1\.parquet"):
        read(tmp_path / "*.parquet")
    with pytest.raises(JobError, match="mixes file formats"):
        read(tmp_path)


def test_a_source_without_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"no file or folder matches .*\*\.jsonl"):
        find_inputs([str(tmp_path / "*.jsonl")])
    with pytest.raises(JobError, match=r"empty has no \.jsonl"):
        find_inputs([tmp_path / "empty"])
    with pytest.raises(JobError, match="ftp://host/rows has an unknown scheme; use s3://, gs://"):
        find_inputs(["ftp://host/rows"])
