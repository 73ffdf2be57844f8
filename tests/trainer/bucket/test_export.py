"""The exported model on its way from rank 0 through the bucket to the head, which uploads it to the Hub."""

from __future__ import annotations

from pathlib import Path

from spotune.prompting.export_manifest import MANIFEST
from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.export.to_bucket import download_export, upload_exports
from spotune_trainer.job_directory.layout import JobDirectory
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


def test_without_a_bucket_the_export_stays_as_it_is(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    export(directory, 1)
    download_export(directory)
    assert (directory.export / "model.safetensors").read_text() == "weights of step 1"
