"""The model on its way from rank 0 through the bucket to other machines: an export, or what a program has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.job import CheckpointSpec
from spotune.prompting.export_manifest import MANIFEST
from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.state_mirror import pull_job
from spotune_trainer.export.to_bucket import download_export, upload_exports
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training_functions.checkpoints import FolderCheckpoints
from spotune_trainer.training_functions.ranks import Ranks
from tests.trainer.bucket.conftest import linked_directory


def export(directory: JobDirectory, step: int) -> None:
    """Make an export whose files have the same sizes at every step of one digit."""
    directory.export.mkdir(exist_ok=True)
    (directory.export / "model.safetensors").write_text(f"weights of step {step}")
    files.write_json(directory.export / MANIFEST, {"step": step})


def test_head_gets_the_export_of_a_rank_on_another_machine(bucket: Bucket, tmp_path: Path) -> None:
    head, rank = linked_directory(bucket, tmp_path / "head"), linked_directory(bucket, tmp_path / "rank")
    for step in (1, 2):
        export(rank, step)
        upload_exports(rank, lambda: None)
        download_export(head)
        assert (head.export / "model.safetensors").read_text() == f"weights of step {step}"


def test_export_of_this_machine_is_not_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    machine = linked_directory(bucket, tmp_path / "machine")
    export(machine, 1)
    upload_exports(machine, lambda: None)
    written = (machine.export / "model.safetensors").stat().st_mtime_ns
    download_export(machine)
    assert (machine.export / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("folder", ["export", "export-ema"])
def test_a_machine_that_comes_back_has_the_newest_export(bucket: Bucket, tmp_path: Path, folder: str) -> None:
    """The job was made longer and trained on another machine meanwhile."""
    first, other = linked_directory(bucket, tmp_path / "first"), linked_directory(bucket, tmp_path / "other")
    for step, machine in enumerate((first, other), start=1):
        export(machine, step)
        machine.export.rename(machine.root / folder)
        upload_exports(machine, lambda: None)
    pull_job(bucket, first)
    assert (first.root / folder / "model.safetensors").read_text() == "weights of step 2"


def test_without_a_bucket_the_export_stays_as_it_is(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    export(directory, 1)
    download_export(directory)
    assert (directory.export / "model.safetensors").read_text() == "weights of step 1"


def checkpoints(directory: JobDirectory, generation: int) -> FolderCheckpoints:
    """Of a group with one rank."""
    ranks = Ranks(0, 1, None, lambda: None)
    return FolderCheckpoints(
        directory, generation, "training.command", "", 1, CheckpointSpec(), ranks, lambda _: None, lambda: None
    )


@pytest.mark.parametrize("is_output", [True, False])
def test_other_machines_know_whether_a_checkpoint_is_the_model_of_a_program(
    bucket: Bucket, tmp_path: Path, is_output: bool
) -> None:
    """The export of the first group was lost. The nodes of the next one have to agree: one may be the same."""
    first, other = linked_directory(bucket, tmp_path / "first"), linked_directory(bucket, tmp_path / "other")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "model.bin").write_text("weights")
    name = checkpoints(first, 1).commit(10, tmp_path / "output", lambda: None, is_output=is_output).name
    assert [checkpoints(each, 2).is_output(name) for each in (first, other)] == [is_output] * 2
