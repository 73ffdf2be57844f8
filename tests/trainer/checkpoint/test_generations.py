"""The fence: which checkpoints count, what to resume from, and which steps led to the current state."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import (
    Generation,
    choose_checkpoint,
    claim,
    in_lineage,
    is_superseded,
    latest_generation,
    list_generations,
    surviving_steps,
    withdraw,
)
from spotune_trainer.checkpoint.layout import MANIFEST, CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import commit_checkpoint

CLAIM = """
import sys
from pathlib import Path
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
for _ in range(10):
    print(claim(JobDirectory(Path(sys.argv[1])), None).number)
"""


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path)


def chosen(directory: JobDirectory, *corrupt: CheckpointName) -> str | None:
    checkpoint = choose_checkpoint(directory, corrupt).checkpoint
    return str(checkpoint.name) if checkpoint else None


def log_steps(directory: JobDirectory, generation: int, first: int, last: int) -> None:
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True)
    for step in range(first, last + 1):
        files.append_json(logs.steps, {"generation": generation, "step": step})


def survivors(directory: JobDirectory) -> list[tuple[int, int]]:
    return [(record["generation"], record["step"]) for record in surviving_steps(directory)]


def test_racing_processes_claim_every_number_once(directory: JobDirectory) -> None:
    command = [sys.executable, "-c", CLAIM, str(directory.root)]
    claimants = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    numbers = [[int(line) for line in claimant.communicate(timeout=60)[0].split()] for claimant in claimants]
    assert sorted(number for each in numbers for number in each) == list(range(1, 41))
    assert all(each == sorted(each) for each in numbers)
    assert [generation.number for generation in list_generations(directory)] == list(range(1, 41))
    assert not list(directory.generations.glob(".claim*"))


def test_an_interrupted_claim_is_no_generation(directory: JobDirectory) -> None:
    assert claim(directory, None).number == 1
    (directory.generations / ".claim-1234abcd").mkdir()
    assert latest_generation(directory) == 1
    assert claim(directory, None).number == 2


def test_a_withdrawn_claim_takes_nothing_out_of_the_lineage(directory: JobDirectory) -> None:
    claim(directory, None)
    first = commit_checkpoint(directory, 10, 1)
    generation = claim(directory, first)
    commit_checkpoint(directory, 20, 1)
    assert chosen(directory) == "step-00000010.gen-1"
    withdraw(directory, generation)
    assert chosen(directory) == "step-00000020.gen-1"
    assert not is_superseded(directory, 1)
    assert not list(directory.generations.glob(".claim*"))
    assert claim(directory, CheckpointName(20, 1)).number == 2


def test_a_claim_that_is_withdrawn_while_others_read_it_is_no_error(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(directory, None)
    withdraw(directory, claim(directory, None))
    monkeypatch.setattr(JobDirectory, "generation_numbers", lambda _: [1, 2])  # as listed before
    assert list_generations(directory) == [Generation(1, None)]


def test_a_generation_records_what_it_started_from(directory: JobDirectory) -> None:
    assert list_generations(directory) == []
    claim(directory, None)
    claim(directory, CheckpointName(20, 1))
    assert list_generations(directory) == [Generation(1, None), Generation(2, CheckpointName(20, 1))]
    assert [generation.first_step for generation in list_generations(directory)] == [0, 20]
    assert is_superseded(directory, 1)
    assert not is_superseded(directory, 2)


def test_a_folder_that_is_no_generation_is_an_error(directory: JobDirectory) -> None:
    (directory.generations / "0000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"0000001 has no restored\.json: spotune did not make this folder"):
        list_generations(directory)


@pytest.mark.parametrize(
    ("name", "started_from", "counts"),
    [
        (CheckpointName(10, 1), [None], True),
        (CheckpointName(10, 1), [None, None], False),
        (CheckpointName(10, 1), [None, CheckpointName(10, 1)], True),
        (CheckpointName(20, 1), [None, CheckpointName(10, 1)], False),
        (CheckpointName(20, 2), [None, CheckpointName(10, 1)], True),
        (CheckpointName(10, 1), [None, CheckpointName(10, 1), None], False),
        (CheckpointName(10, 1), [None, CheckpointName(10, 1), CheckpointName(5, 1)], False),
        (CheckpointName(5, 1), [None, CheckpointName(10, 1), CheckpointName(5, 1)], True),
    ],
)
def test_a_checkpoint_counts_unless_a_later_generation_started_from_an_older_one(
    name: CheckpointName, started_from: list[CheckpointName | None], counts: bool
) -> None:
    generations = [Generation(number, restored) for number, restored in enumerate(started_from, start=1)]
    assert in_lineage(name, generations) is counts


def test_the_newest_checkpoint_of_the_lineage_is_chosen(directory: JobDirectory) -> None:
    assert chosen(directory) is None
    claim(directory, None)
    first = commit_checkpoint(directory, 10, 1)
    newest = commit_checkpoint(directory, 20, 1)
    assert chosen(directory) == "step-00000020.gen-1"
    assert chosen(directory, newest) == "step-00000010.gen-1"
    assert chosen(directory, newest, first) is None


def test_what_a_superseded_generation_commits_is_not_chosen(directory: JobDirectory) -> None:
    claim(directory, None)
    restored = commit_checkpoint(directory, 10, 1)
    claim(directory, restored)
    commit_checkpoint(directory, 30, 1)
    assert chosen(directory) == "step-00000010.gen-1"
    commit_checkpoint(directory, 20, 2)
    assert chosen(directory) == "step-00000020.gen-2"


def test_torn_checkpoints_are_skipped_with_their_reasons(directory: JobDirectory) -> None:
    claim(directory, None)
    for step in (10, 20, 30, 40, 50):
        commit_checkpoint(directory, step, 1)
    folders = {step: directory.checkpoints / f"step-{step:08d}.gen-1" for step in (20, 30, 40, 50)}
    (folders[50] / MANIFEST).unlink()
    (folders[40] / MANIFEST).write_text("{")
    (folders[30] / MANIFEST).write_text('{"format": 0}')
    (folders[20] / "rank-00000.safetensors").unlink()
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    assert choice.checkpoint.name == CheckpointName(10, 1)
    assert [each.name.step for each in choice.skipped] == [40, 30, 20], "an uncommitted one is not reported"
    reasons = [each.reason for each in choice.skipped]
    assert "is not valid JSON" in reasons[0]
    assert reasons[1] == "manifest of format 0, this version reads format 1"
    assert reasons[2] == "rank-00000.safetensors is missing"


def test_checkpoint_of_a_newer_version_is_not_skipped(directory: JobDirectory) -> None:
    """The next commits would delete it, though the version that has written it can read it."""
    claim(directory, None)
    commit_checkpoint(directory, 10, 1)
    newest = directory.checkpoints / str(commit_checkpoint(directory, 20, 1))
    (newest / MANIFEST).write_text('{"format": 7, "unheard": 1}')
    message = (
        r"newer version of spotune has written the checkpoint step-00000020\.gen-1 \(manifest of format 7, this "
        r"version reads format 1\): run that version, or move /.*/step-00000020\.gen-1 elsewhere"
    )
    with pytest.raises(JobError, match=message):
        choose_checkpoint(directory)
    shutil.rmtree(newest)
    assert chosen(directory) == "step-00000010.gen-1"


@pytest.mark.parametrize("found_by", ["size", "reading"])
def test_nothing_begins_again_if_all_checkpoints_are_lost(directory: JobDirectory, found_by: str) -> None:
    claim(directory, None)
    choose_checkpoint(directory).raise_if_all_are_lost()
    names = [commit_checkpoint(directory, step, 1) for step in (10, 20)]
    choose_checkpoint(directory, names[1:]).raise_if_all_are_lost()
    if found_by == "size":
        for name in names:
            (directory.checkpoints / str(name) / "rank-00000.safetensors").unlink()
        choice = choose_checkpoint(directory)
    else:
        choice = choose_checkpoint(directory, names)
    with pytest.raises(JobError, match=r"none .* can be used: step-00000010\.gen-1, step-00000020\.gen-1 \(the log"):
        choice.raise_if_all_are_lost()


def test_torn_checkpoints_older_than_the_chosen_one_are_not_reported(directory: JobDirectory) -> None:
    claim(directory, None)
    commit_checkpoint(directory, 10, 1)
    commit_checkpoint(directory, 20, 1)
    (directory.checkpoints / "step-00000010.gen-1" / MANIFEST).unlink()
    assert choose_checkpoint(directory).skipped == ()


def test_surviving_steps_follow_the_newest_generation_back(directory: JobDirectory) -> None:
    """Of each older generation, only the steps up to what its successor restored count."""
    assert survivors(directory) == []
    claim(directory, None)
    log_steps(directory, 1, 1, 7)
    claim(directory, CheckpointName(5, 1))
    log_steps(directory, 2, 6, 9)
    assert survivors(directory) == [(1, step) for step in range(1, 6)] + [(2, step) for step in range(6, 10)]
    claim(directory, CheckpointName(5, 1))
    assert survivors(directory) == [(1, step) for step in range(1, 6)]
    log_steps(directory, 3, 6, 6)
    assert survivors(directory) == [*[(1, step) for step in range(1, 6)], (3, 6)]


def test_no_step_survives_a_start_from_the_beginning(directory: JobDirectory) -> None:
    claim(directory, None)
    log_steps(directory, 1, 1, 4)
    claim(directory, None)
    log_steps(directory, 2, 1, 2)
    assert survivors(directory) == [(2, 1), (2, 2)]


def test_steps_that_a_superseded_generation_still_logs_do_not_survive(directory: JobDirectory) -> None:
    claim(directory, None)
    log_steps(directory, 1, 1, 5)
    claim(directory, CheckpointName(5, 1))
    log_steps(directory, 2, 6, 7)
    before = survivors(directory)
    for step in (6, 7, 8):
        files.append_json(directory.generation_logs(1).steps, {"generation": 1, "step": step})
    assert survivors(directory) == before
