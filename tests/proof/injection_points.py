"""The moments of a run in which it can be hit, as anybody can see them from outside."""

from __future__ import annotations

from pathlib import Path

from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.supervisor.ray_head.processes import Process
from tests.proof.history import committed, read_generations, segments
from tests.proof.schedules import COMPARED_STEPS, Moment
from tests.trainer.support.live import LiveRun


def is_now(moment: Moment, run: LiveRun, generation: int) -> bool:
    """Whether it is that moment in a generation, which is the newest."""
    match moment:
        case Moment.STEP:
            return True
        case Moment.START:
            return _steps(run, generation) == 0
        case Moment.SAVE:
            folders = list(run.directory.checkpoints.glob(f"step-*.gen-{generation}"))
            return any(not (folder / MANIFEST).exists() for folder in folders)
        case Moment.RESTORE:
            return _steps(run, generation) == 0 and any(_reads_checkpoint(rank, run) for rank in run.ranks().values())
        case Moment.EXPORT:
            return any(run.directory.root.glob(f".{run.directory.export.name}.????????"))


def can_be_compared(run: LiveRun) -> bool:
    """Whether as many steps as are compared after a change of world size are committed at the present one."""
    generations = read_generations(run.directory)
    own = [name.step for name in committed(run.directory) if name.generation == generations[-1].number]
    return bool(own) and max(own) >= segments(generations)[-1].first_step + COMPARED_STEPS


def newest_generation(run: LiveRun) -> int:
    """Its number; 0 before the first."""
    return latest_generation(run.directory)


def _steps(run: LiveRun, generation: int) -> int:
    log = run.directory.generation_logs(generation).steps
    return log.stat().st_size if log.exists() else 0


def _reads_checkpoint(rank: Process, run: LiveRun) -> bool:
    """Whether a process has a file of a checkpoint open."""
    try:
        opened = [str(link.readlink()) for link in Path(f"/proc/{rank.pid}/fd").iterdir()]
    except OSError:  # it has ended, or closed one just then
        return False
    return any(path.startswith(f"{run.directory.checkpoints}/") for path in opened)
