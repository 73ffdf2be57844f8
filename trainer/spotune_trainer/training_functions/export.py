"""The model of a job with code of the user: the files of a checkpoint, as that code has saved them."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.folders import pull_generation_logs, replace_folder
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.generations import raise_if_superseded, surviving_steps
from spotune_trainer.checkpoint.layout import MANIFEST, Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.checkpoint.reader import fetch
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask

logger = logging.getLogger("spotune.worker")

_CHUNK_BYTES = 16 * 2**20


def export_files(
    checkpoint: Checkpoint,
    target: Path,
    before_replacing: Callable[[], None] = lambda: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> str:
    """Copy the files of a checkpoint to a new folder, which replaces an earlier one. A kill leaves one of both or none.

    Args:
        checkpoint: the checkpoint.
        target: the folder.
        before_replacing: called once the copy is durable; what it raises ends the export.
        heartbeat: called while files are copied and made durable.

    Returns:
        SHA-256 in hex over names and contents of all files.
    """
    digest = hashlib.sha256()
    with files.replacing_directory(target, before_replacing, heartbeat) as folder:
        for entry in sorted(checkpoint.manifest.files, key=lambda entry: entry.name):
            digest.update(f"{entry.name}\0".encode())
            copy = folder / entry.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with (checkpoint.path / entry.name).open("rb") as reader, copy.open("wb") as writer:
                while chunk := reader.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    writer.write(chunk)
                    heartbeat()
    return digest.hexdigest()


def export_model(task: WorkerTask, name: CheckpointName, step: int, reporter: ProgressReporter) -> dict[str, Any]:
    """Export a checkpoint as the trained model; returns the summary of the run.

    Args:
        task: of the generation, which has committed or verified the checkpoint.
        name: of the checkpoint.
        step: number of steps done.
        reporter: of rank 0.

    Raises:
        BucketError: the bucket that keeps the job cannot be read, or does not accept the model.
        SupersededError: a later generation has started; nothing is exported.
    """
    directory = task.job_directory
    reporter.set_phase(Phase.EXPORTING)
    checkpoint = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(checkpoint, Checkpoint), "it was committed or verified by this group"
    fetch(checkpoint, heartbeat=reporter.heartbeat)
    fence = partial(raise_if_superseded, directory, task.generation)
    sha256 = export_files(checkpoint, directory.export, fence, reporter.heartbeat)
    if (bucket := bucket_of(directory)) is not None:
        manifest = directory.export / MANIFEST  # without a rename, this file says that the others are there
        shutil.copyfile(checkpoint.path / MANIFEST, manifest)
        replace_folder(bucket, directory, directory.export, manifest, reporter.heartbeat)
        learn_of_other_machines(directory)
    reporter.update(exportStep=name.step)
    reporter.record_event("exported", sha256=sha256, step=name.step)
    if name.step < step:
        logger.warning("the model is that of step %d; later steps have no checkpoint", name.step)
    reporter.sync()
    steps = surviving_steps(directory)
    losses = [line["loss"] for line in steps if line.get("loss") is not None]
    return {
        "steps": step,
        "trainLoss": sum(losses) / len(losses) if losses else None,
        "metrics": steps[-1].get("metrics", {}) if steps else {},
        "exportStep": name.step,
        "exportSha256": sha256,
    }


def learn_of_other_machines(directory: JobDirectory) -> None:
    """If a bucket keeps the job: have generations, manifests and logs of generations on other machines here.

    Raises:
        BucketError: the bucket cannot be read.
    """
    if (bucket := bucket_of(directory)) is not None:
        refresh(bucket, directory)
        pull_generation_logs(bucket, directory)
