"""The model of a job with a training function: the files of a checkpoint, as the function has saved them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint

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
        heartbeat: called while files are copied.

    Returns:
        SHA-256 in hex over names and contents of all files.
    """
    digest = hashlib.sha256()
    with files.replacing_directory(target, before_replacing) as folder:
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
