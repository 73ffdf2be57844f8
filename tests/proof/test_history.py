"""The proof's own reader of job directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.history import lineage, read_generations, segments, steps_lost, surviving


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path)


def add(directory: JobDirectory, number: int, restored: str | None, steps: range, world_size: int = 2) -> None:
    """A generation that logged some steps."""
    claim = directory.generations / f"{number:07d}"
    claim.mkdir(parents=True)
    (claim / "restored.json").write_text(json.dumps({"checkpoint": restored, "time": float(number)}))
    log = directory.generation_logs(number).steps
    log.parent.mkdir(parents=True)
    lines = [json.dumps({"step": step, "generation": number, "worldSize": world_size, "loss": 1.0}) for step in steps]
    log.write_text("".join(f"{line}\n" for line in lines))


def made_by(records: list[Any]) -> list[tuple[int, int]]:
    return [(record["step"], record["generation"]) for record in records]


def test_steps_survive_up_to_the_checkpoint_of_the_next_generation(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 8))
    add(directory, 2, "step-00000004.gen-1", range(5, 7))
    add(directory, 3, "step-00000004.gen-1", range(5, 9))
    generations = read_generations(directory)
    assert made_by(list(surviving(generations))) == [(s, 1) for s in range(1, 5)] + [(s, 3) for s in range(5, 9)]
    assert steps_lost(generations) == 5


def test_restart_from_the_beginning_discards_earlier_steps(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 4))
    add(directory, 2, None, range(1, 6), world_size=3)
    generations = read_generations(directory)
    assert made_by(list(surviving(generations))) == [(s, 2) for s in range(1, 6)]
    (only,) = segments(generations)
    assert (only.world_size, only.start) == (3, None)


def test_segments_are_cut_where_the_world_size_changes(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 5))
    add(directory, 2, "step-00000004.gen-1", range(5, 9))
    add(directory, 3, "step-00000008.gen-2", range(9, 9), world_size=4)
    add(directory, 4, "step-00000008.gen-2", range(9, 12), world_size=3)
    found = segments(read_generations(directory))
    assert [(each.world_size, each.start, len(each.steps)) for each in found] == [
        (2, None, 8),
        (3, CheckpointName(8, 2), 3),
    ]


def test_truncated_line_is_not_a_step(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 3))
    with directory.generation_logs(1).steps.open("a") as log:
        log.write('{"step": 3, "gen')
    assert made_by(list(read_generations(directory)[0].steps)) == [(1, 1), (2, 1)]


def test_a_line_that_did_not_fit_on_the_volume_counts_once(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 4))
    log = directory.generation_logs(1).steps
    first, second, third = log.read_text().splitlines(keepends=True)
    log.write_text(first + second[:20] + "\n" + second[:30] + "\n" + second + third)
    assert made_by(list(read_generations(directory)[0].steps)) == [(1, 1), (2, 1), (3, 1)]


def test_a_line_that_was_written_twice_counts_twice(directory: JobDirectory) -> None:
    add(directory, 1, None, range(1, 3))
    log = directory.generation_logs(1).steps
    first, second = log.read_text().splitlines(keepends=True)
    log.write_text(first + second + second)
    assert made_by(list(read_generations(directory)[0].steps)) == [(1, 1), (2, 1), (2, 1)]


def test_generation_that_started_from_its_own_commit_is_rejected(directory: JobDirectory) -> None:
    add(directory, 1, "step-00000004.gen-1", range(5, 6))
    with pytest.raises(ValueError, match="cannot have started from"):
        lineage(read_generations(directory))
