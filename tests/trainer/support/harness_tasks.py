"""A task of lm-evaluation-harness in a folder of its own, as users write them: rows as JSON lines, and a task file."""

from __future__ import annotations

import json
from pathlib import Path

TASK = "singers"
_TASK_FILE = """\
task: singers
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no", "many singers"]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 1.0}
"""


def write_task(folder: Path, rows: int = 24) -> Path:
    """Write the task `singers` with rows of three answers; returns the folder."""
    folder.mkdir()
    content = [{"question": f"how many singers are there ? {number}", "answer": number % 3} for number in range(rows)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    (folder / "singers.yaml").write_text(_TASK_FILE)
    return folder
