"""Detects from outside whether a run is at an injection point."""

from __future__ import annotations

import os
from pathlib import Path

from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.checkpoint.memory.segment import MEMORY_FILE
from spotune_trainer.supervisor.ray_head.processes import Process
from tests.proof.history import committed, read_generations, segments
from tests.proof.schedules import COMPARED_STEPS, InjectionPoint
from tests.trainer.support.live import LiveRun


def is_at(point: InjectionPoint, run: LiveRun, generation: int) -> bool:
    """Whether the newest generation is at the injection point."""
    match point:
        case InjectionPoint.STEP:
            return True
        case InjectionPoint.START:
            return _steps(run, generation) == 0
        case InjectionPoint.SAVE:
            folders = list(run.directory.checkpoints.glob(f"step-*.gen-{generation}"))
            return any(not (folder / MANIFEST).exists() for folder in folders)
        case InjectionPoint.RESTORE:
            return _steps(run, generation) == 0 and any(_reads_checkpoint(rank, run) for rank in run.ranks().values())
        case InjectionPoint.EXPORT:
            return any(run.directory.root.glob(f".{run.directory.export.name}.????????"))


def has_comparable_steps(run: LiveRun) -> bool:
    """Whether enough steps for a comparison are committed at the current world size."""
    generations = read_generations(run.directory)
    own = [name.step for name in committed(run.directory) if name.generation == generations[-1].number]
    return bool(own) and max(own) >= segments(generations)[-1].first_step + COMPARED_STEPS


def newest_generation(run: LiveRun) -> int:
    """Number of the newest generation; 0 before the first."""
    return latest_generation(run.directory)


def _steps(run: LiveRun, generation: int) -> int:
    log = run.directory.generation_logs(generation).steps
    return log.stat().st_size if log.exists() else 0


def _reads_checkpoint(rank: Process, run: LiveRun) -> bool:
    """Whether a process has a file of a checkpoint open, or a segment of shared memory for reading only."""
    try:
        opened = {link.name: str(link.readlink()) for link in Path(f"/proc/{rank.pid}/fd").iterdir()}
        return any(
            path.startswith(f"{run.directory.checkpoints}/") or (MEMORY_FILE in path and _is_read_only(rank, name))
            for name, path in opened.items()
        )
    except OSError:  # the process exited or closed the file meanwhile
        return False


def _is_read_only(process: Process, descriptor: str) -> bool:
    lines = Path(f"/proc/{process.pid}/fdinfo/{descriptor}").read_text().splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return flags & os.O_ACCMODE == os.O_RDONLY
