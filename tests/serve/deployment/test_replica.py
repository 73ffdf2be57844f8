"""What a replica finds out about its container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotune_serve.deployment.replica import available_processors

PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "processors"),
    [("100000 100000", 1), ("50000 100000", 1), ("150000 100000", min(2, PROCESSORS)), ("max 100000", PROCESSORS)],
)
def test_the_processors_are_those_of_the_limit(limit: str, processors: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert available_processors(tmp_path) == processors


@pytest.mark.parametrize("content", [None, "", "unknown"])
def test_without_a_readable_limit_all_processors_count(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert available_processors(tmp_path) == PROCESSORS
