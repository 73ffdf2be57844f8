"""A task of lm-evaluation-harness in a folder of its own, as users write them: rows as JSON lines, and a task file."""

from __future__ import annotations

import json
from pathlib import Path

TASK = "singers"
ROLLING_TASK = "lyrics"
GENERATING_TASK = "answers"
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
_ROLLING_TASK_FILE = """\
task: lyrics
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
metadata: {version: 1.0}
"""
_GENERATING_TASK_FILE = """\
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{question}}"
generation_kwargs: {until: ["s"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: chrf}]
filter_list:
  - {name: whole, filter: [{function: take_first}]}
metadata: {version: 1.0}
"""


def write_task(folder: Path, rows: int = 24) -> Path:
    """Write the task `singers` with rows of three answers; returns the folder."""
    folder.mkdir()
    content = [{"question": f"how many singers are there ? {number}", "answer": number % 3} for number in range(rows)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    (folder / "singers.yaml").write_text(_TASK_FILE)
    return folder


def write_tasks(folder: Path, rows: int = 24) -> Path:
    """Write a task of each kind of request over the same rows; returns the folder."""
    write_task(folder, rows)
    (folder / "lyrics.yaml").write_text(_ROLLING_TASK_FILE)
    (folder / "answers.yaml").write_text(_GENERATING_TASK_FILE)
    return folder
