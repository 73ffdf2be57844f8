"""The export of one version of a model: a job that is trained further replaces its export while services load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spotune.errors import JobError
from spotune.prompting.export_manifest import ExportManifest, previous_export
from spotune_serve.deployment.hub import ModelSource, model_folder

Loaded = TypeVar("Loaded")


def export_folder(directory: Path, step: int | None) -> Path:
    """The folder with the export of a step: `directory`, or the one that the trainer keeps beside it.

    Args:
        directory: the folder of an export, or of any other model.
        step: the step of the version; None: whatever is in the folder.

    Raises:
        JobError: neither folder has the export of this step.
    """
    if step is None:
        return directory
    kept = previous_export(directory, step)
    recorded = _recorded_step(directory)
    if recorded == step or (recorded is None and directory.is_dir() and not kept.is_dir()):
        return directory  # without a record, an older version wrote it
    if _recorded_step(kept) == step:
        return kept
    found = f"has the export of step {recorded}" if recorded is not None else "does not exist"
    raise JobError(
        f"the export of step {step} is gone: {directory} {found}, and there is no {kept.name} beside it. A job "
        "keeps one previous export: serve the newest version, or export the checkpoint of that step again."
    )


def load_export(directory: Path, step: int | None, load: Callable[[Path], Loaded]) -> Loaded:
    """Load the export of a step, again if the trainer has replaced it meanwhile: all files are then of this step.

    Args:
        directory: see `export_folder`.
        step: see `export_folder`.
        load: loads a folder.

    Raises:
        JobError: neither folder has the export of this step, or it cannot be loaded.
    """
    while True:
        folder = export_folder(directory, step)
        try:
            loaded = load(folder)
        except (JobError, OSError):
            if export_folder(directory, step) == folder:
                raise
            continue  # it was renamed while it was read
        if export_folder(directory, step) == folder:
            return loaded


def load_version(
    model: ModelSource, step: int | None, load: Callable[[Path], Loaded], *, weights: bool = True
) -> Loaded:
    """Load one version of a model from its folder, the Hub or a bucket.

    Args:
        model: see `model_folder`.
        step: with the folder of an export: its step; None: whatever is in the folder.
        load: loads a folder.
        weights: whether the weights of a model that is downloaded are needed.

    Raises:
        SpotuneError: the version does not exist or cannot be loaded, see `export_folder` and `model_folder`.
    """
    if step is not None and isinstance(model, Path):
        return load_export(model, step, load)
    return load(model_folder(model, weights=weights))


def _recorded_step(directory: Path) -> int | None:
    """The step that a folder's manifest records; None without one."""
    try:
        return ExportManifest.read(directory).step
    except (JobError, OSError):
        return None
