"""The checkpoint that a run begins from when another program has trained the steps before it.

It is of generation 0, which no worker group is: the first one restores it as it would that of a group before.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from spotune.errors import UsageError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import list_generations
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest, list_folders
from spotune_trainer.checkpoint.writer import commit
from spotune_trainer.export.universal import Report, open_universal, write_whole
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import build_skeleton

GENERATION = 0


def refuse_begun(directory: JobDirectory) -> None:
    """Refuse a run that has a generation or a checkpoint; raises UsageError."""
    if list_generations(directory) or list_folders(directory.checkpoints):
        raise UsageError(
            f"{directory.root} has begun already: its checkpoints are of its own training. Convert into a directory "
            "without generations and checkpoints."
        )


def begin_from_universal(
    directory: JobDirectory, job: FinetuneJob, source: Path, report: Report = lambda done, total: None
) -> Manifest:
    """Commit a universal checkpoint of DeepSpeed as what a run of `job` begins from.

    Args:
        directory: of a run that has not begun, and whose lock is held.
        job: what is to be trained; says which parameters there are.
        source: the universal checkpoint's folder.
        report: told how far it is.

    Raises:
        UsageError: the run has begun.
        JobError: it is no universal checkpoint, or not one of the job's model.
    """
    refuse_begun(directory)
    parameters = build_skeleton(job).named_parameters()
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
        write_whole(universal, folder, report)
        return commit(directory, name, 1, manifest)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
