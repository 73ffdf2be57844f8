"""Imports a DeepSpeed universal checkpoint as the first checkpoint of a new run.

The imported checkpoint has generation 0, which no worker group has. The first worker group resumes from it as from the
checkpoint of an earlier group.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from spotune.errors import JobError, UsageError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import list_generations
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest, list_folders
from spotune_trainer.checkpoint.writer import commit
from spotune_trainer.export.universal import ProgressCallback, check_has_moments, open_universal, write_single_rank_file
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import build_on_meta_device

GENERATION = 0


def check_not_started(directory: JobDirectory) -> None:
    """Raise UsageError if the run already has a generation or a checkpoint."""
    if list_generations(directory) or list_folders(directory.checkpoints):
        raise UsageError(
            f"{directory.root} has already started training. Import into a directory without generations and "
            "checkpoints."
        )


def import_universal_checkpoint(
    directory: JobDirectory, job: FinetuneJob, source: Path, report: ProgressCallback = lambda done, total: None
) -> Manifest:
    """Commit a DeepSpeed universal checkpoint as the one that a run of `job` starts from.

    Args:
        directory: of a run that has not started. The caller holds its lock.
        job: the job to train; it determines the parameters.
        source: the universal checkpoint's folder.
        report: called with the bytes done and the total bytes.

    Returns:
        The manifest of the committed checkpoint.

    Raises:
        UsageError: the run has already started.
        JobError: the source is not a universal checkpoint, or does not match the job's model or optimizer.
    """
    check_not_started(directory)
    check_has_moments(job)
    if job.spec.training.ema_decay:
        raise JobError("training.emaDecay: a universal checkpoint has no moving average of the weights: remove it")
    parameters = build_on_meta_device(job).named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters if parameter.requires_grad}
    universal = open_universal(source, shapes)
    name = CheckpointName(universal.step, GENERATION)

    def manifest(entries: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            step=universal.step,
            generation=GENERATION,
            optimizer_step=universal.optimizer_step,
            fingerprint=fingerprint(job),
            plan_version=0,
            world_size=len(entries),
            zero_stage=0,
            time=time.time(),
            files=entries,
            parameters=shapes,
        )

    folder = directory.checkpoints / str(name)
    try:
        write_single_rank_file(universal, folder, report)
        return commit(directory, name, 1, manifest)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
