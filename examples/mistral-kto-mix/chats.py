"""Converts the published rows of KTO-mix to chats with a label, for `spotune shard`.

    python examples/mistral-kto-mix/chats.py data/raw/data/train-*.parquet --output data/rows/train.jsonl

A published row has the messages of its prompt and of its completion in two columns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pyarrow import parquet


def main() -> None:
    """Write a line with messages and label for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="PARQUET")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", encoding="utf-8") as lines:
        for file in arguments.files:
            for row in parquet.read_table(file, columns=["prompt", "completion", "label"]).to_pylist():
                chat = {"messages": row["prompt"] + row["completion"], "label": row["label"]}
                lines.write(f"{json.dumps(chat, ensure_ascii=False)}\n")


if __name__ == "__main__":
    main()
