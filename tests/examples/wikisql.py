"""A miniature WikiSQL release, written by hand: the same files, with two tables and a few questions per split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLES: list[dict[str, Any]] = [
    {
        "id": "1-10015132-11",
        "page_title": "Toronto Raptors all-time roster",
        "header": ["Player", "No.", "School/Club Team"],
        "types": ["text", "text", "text"],
        "rows": [["Antonio Lang", "21", "Duke"], ["Martin Lewis", "32, 44", "Butler CC (KS)"]],
    },
    {
        "id": "2-1001",
        "header": ["Height 6'2\" or more", "Points", "Year"],
        "types": ["text", "real", "real"],
        "rows": [["yes", 21.5, 1999], ["no", 3, 2001]],
    },
]


def question(table: int, text: str, sel: int, agg: int, *conds: list[Any]) -> dict[str, Any]:
    """A line of `<split>.jsonl`; columns, aggregates and operators are given by number."""
    return {
        "phase": 1,
        "table_id": TABLES[table]["id"],
        "question": text,
        "sql": {"sel": sel, "conds": list(conds), "agg": agg},
    }


QUESTIONS = [
    question(0, "Which school did Antonio Lang play for?", 2, 0, [0, 0, "Antonio Lang"]),
    question(0, "How many players are there from O'Hara?", 0, 3, [2, 0, "O'Hara"]),
    question(1, "What is the average of points before 2001?", 1, 5, [2, 2, 2001]),
    question(1, "Since when are there more than 20.5 points with a height?", 2, 2, [1, 1, 20.5], [0, 0, "yes"]),
    question(1, "What are all of the years?", 2, 0),
]


def write_release(folder: Path) -> Path:
    """Write the files of the release that the script reads to `folder`."""
    for split in ("train", "dev", "test"):
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
        (folder / f"{split}.tables.jsonl").write_text("".join(f"{json.dumps(table)}\n" for table in TABLES))
    return folder
