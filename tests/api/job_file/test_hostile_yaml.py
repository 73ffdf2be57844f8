"""YAML that fuzzing found to crash, hang or blow up the loader: each is an error with file and line, or is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune.job_file.yaml_file import read_documents

ALIASES = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]" for inner, name in zip("abcdefgh", "bcdefghi", strict=True)]
)
"""Nine to the power of nine values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "with its aliases, it has more than 100,000 values"),
        ("a: 2027-99-99", "reads as timestamp is not one: month must be in 1..12"),
        ("a: !!int x", "reads as int is not one"),
        ("a: !!bool x", "reads as bool is not one"),
        ("a: !!timestamp x", "reads as timestamp is not one"),
        (f"a: 0x{'f' * 9000}", "a number has too many digits"),
        ('a: "\\ud83d"', "is half a character"),
        ('"\\ud83d": a', "is half a character"),
    ],
)
def test_hostile_value_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(JobError, match=rf"job\.yaml:\d+: is not YAML: .*{message}"):
        read_documents(file)


def test_both_halves_of_a_character_are_joined(tmp_path: Path) -> None:
    """JSON writes an emoji like this, and every JSON file is YAML."""
    file = tmp_path / "job.json"
    file.write_text('{"\\ud83d\\ude00": "\\ud83d\\ude00"}')
    assert [document.content for document in read_documents(file)] == [{"😀": "😀"}]
