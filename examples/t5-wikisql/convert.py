"""Converts WikiSQL (Zhong et al., 2017) to rows with question, columns and SQL, for `spotune shard`.

    python examples/t5-wikisql/convert.py

Reads `<split>.jsonl` and `<split>.tables.jsonl` of the release in data/, and writes data/rows/<split>.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SPLITS = ("train", "dev", "test")
AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
"""Indexed by WikiSQL's numbers (`agg_ops` in its lib/query.py)."""
OPERATORS = ("=", ">", "<")
"""The same for operators of conditions (`cond_ops`)."""

Row = dict[str, str]


def convert(folder: Path, split: str) -> Iterator[Row]:
    """The rows of a split, in the order of its questions."""
    headers = {table["id"]: table["header"] for table in _objects(folder / f"{split}.tables.jsonl")}
    for asked in _objects(folder / f"{split}.jsonl"):
        header = headers[asked["table_id"]]
        yield {"question": asked["question"], "columns": " | ".join(header), "sql": to_sql(asked["sql"], header)}


def to_sql(query: Mapping[str, Any], header: list[str]) -> str:
    """A WikiSQL query as SQL on a table named `data`.

    Args:
        query: `sel` (index of the column), `agg` (index in `AGGREGATES`), `conds` ([column, operator, value], ...).
        header: names of the columns.
    """
    column, aggregate = _name(header[query["sel"]]), AGGREGATES[query["agg"]]
    selected = f"{aggregate}({column})" if aggregate else column
    conditions = [_condition(_name(header[number]), OPERATORS[kind], value) for number, kind, value in query["conds"]]
    return f"SELECT {selected} FROM data" + (f" WHERE {' AND '.join(conditions)}" if conditions else "")


def _condition(column: str, operator: str, value: str | float) -> str:
    """A comparison. `a < b` is written as `b > a`, because T5's vocabulary has no token for `<`."""
    literal = _quoted(value, "'") if isinstance(value, str) else json.dumps(value)
    return f"{literal} > {column}" if operator == "<" else f"{column} {operator} {literal}"


def _name(column: str) -> str:
    return _quoted(column, '"')


def _quoted(text: str, mark: str) -> str:
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def main() -> None:
    """Converts every split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parent / "data", help="folder with the unpacked release"
    )
    folder = parser.parse_args().data
    (folder / "rows").mkdir(exist_ok=True)
    for split in SPLITS:
        rows = list(convert(folder, split))
        (folder / "rows" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{split}: {len(rows):,} questions")


if __name__ == "__main__":
    main()
