"""Ranks on machines that share nothing but the bucket: they commit together, and others continue with the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spotune_trainer.bucket.checkpoints import delete_checkpoints, list_checkpoint_files, refresh
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim, surviving_steps
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit, WorkerTask
from spotune_trainer.training.worker import TrainResult, run_worker
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import STEPS, Layout, Runs, losses, make_task, sample_hashes

pytestmark = pytest.mark.slow

LAYOUT = Layout(2, 2)


def train_on_own_machine(
    rank: int, world_size: int, task: WorkerTask, homes: Sequence[str], access: Mapping[str, str]
) -> TrainResult:
    os.environ |= access
    os.environ["LOCAL_RANK"] = "0"  # of its machine
    return run_worker(replace(task, directory=homes[rank]), rank, world_size)


def test_other_machines_continue_with_the_same_bits(runs: Runs, bucket: Bucket, tmp_path: Path) -> None:
    undisturbed = runs.finished(LAYOUT)
    access = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "S3_"))}

    def train(name: str) -> JobDirectory:
        """Train the next generation on new machines; returns the directory of rank 0."""
        driver, *homes = (linked_directory(bucket, tmp_path / name / each) for each in ("driver", "rank0", "rank1"))
        refresh(bucket, driver)
        checkpoint = choose_checkpoint(driver).checkpoint
        generation = claim(driver, checkpoint.name if checkpoint else None)
        task = make_task(driver, runs.job(), LAYOUT, generation)
        run_group(2, train_on_own_machine, task, [str(each.root) for each in homes], access, timeout=240)
        return homes[0]

    train("first")
    listed = list_checkpoint_files(bucket)
    delete_checkpoints(bucket, listed, [name for name in listed if f"{STEPS:08d}" in name])
    resumed = train("second")
    assert [record["generation"] for record in surviving_steps(resumed)] == [1] * 5 + [2] * 5
    assert sample_hashes(resumed) == sample_hashes(undisturbed)
    assert losses(resumed) == losses(undisturbed)
    weights = "model.safetensors"
    assert (resumed.export / weights).read_bytes() == (undisturbed.export / weights).read_bytes()
    assert bucket.read(f"export/{weights}") == (undisturbed.export / weights).read_bytes()
    assert bucket.read("logs/gen-2/worker-1.log.parts/000000000000") is not None


def test_notice_of_an_agent_without_rank_0_lets_the_group_commit_and_leave(
    runs: Runs, bucket: Bucket, tmp_path: Path
) -> None:
    """Without a driver nobody else learns that the pod of the other ranks ends."""
    driver, exits = train_with_notice(runs, bucket, tmp_path, lambda logs: logs.agent_notice)
    assert exits == [RankExit.YIELDED] * 2
    refresh(bucket, driver)
    checkpoint = choose_checkpoint(driver).checkpoint
    assert checkpoint is not None
    assert 0 < checkpoint.name.step < STEPS


def test_notice_of_the_driver_is_read_by_rank_0_alone(runs: Runs, bucket: Bucket, tmp_path: Path) -> None:
    """Each machine gets it at another time: if all ranks read it, each would ask for a commit of its own."""
    _, exits = train_with_notice(runs, bucket, tmp_path, lambda logs: logs.notice)
    assert exits == [RankExit.TRAINED] * 2


def train_with_notice(
    runs: Runs, bucket: Bucket, tmp_path: Path, path: Callable[[GenerationLogs], Path]
) -> tuple[JobDirectory, list[RankExit]]:
    """Train with a notice on the machine of rank 1; returns the directory of the driver, and how the ranks ended."""
    access = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "S3_"))}
    driver, *homes = (linked_directory(bucket, tmp_path / each) for each in ("driver", "rank0", "rank1"))
    generation = claim(driver, None)
    task = make_task(driver, runs.job(), LAYOUT, generation)
    notice = path(homes[1].generation_logs(generation.number))
    notice.parent.mkdir(parents=True)
    write_notice(notice, seconds=None, reason="a worker's pod is about to end", leave=True)
    results = run_group(2, train_on_own_machine, task, [str(each.root) for each in homes], access, timeout=240)
    return driver, [result.exit for result in results]
