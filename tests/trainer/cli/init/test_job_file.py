"""The text of a job file: what is read back is what was chosen."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from spotune.job_file.yaml_file import read_documents
from spotune_trainer.cli.init.job_file import content_of, render_job_file
from spotune_trainer.cli.init.profiles import Choice

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_a_comment_stands_above_its_value_and_lines_are_short() -> None:
    choices = [
        Choice("metadata.name", "sql", "A name."),
        Choice("spec.training.epochs", 3, "Few rows, " * 30),
        Choice("spec.training.learningRate", 2e-05),
        Choice("spec.adapter", None, "adapter: none."),
        Choice("spec.workers.gpus", 0),
    ]
    lines = render_job_file(choices, "First line.\n\nSecond line.").splitlines()
    assert lines[:3] == ["# First line.", "#", "# Second line."]
    assert lines[5:8] == ["metadata:", "  # A name.", '  name: "sql"']
    assert max(map(len, lines)) <= 100
    assert lines[-5:] == [
        "    epochs: 3",
        "    learningRate: 2.0e-05",
        "  # adapter: none.",
        "  workers:",
        "    gpus: 0",
    ]


@given(TEXT, TEXT, st.floats(1e-9, 1.0))
def test_any_text_is_read_back(value: str, reason: str, rate: float) -> None:
    choices = [
        Choice("metadata.name", "1e4", reason),
        Choice("spec.dataset.prompt", value, reason),
        Choice("spec.training.learningRate", rate),
        Choice("spec.adapter.lora", {"r": 16, "targetModules": "all-linear"}),
    ]
    with TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(render_job_file(choices, reason), encoding="utf-8", newline="")
        (document,) = read_documents(file)
    assert document.content == content_of(choices)
