"""Accelerate in a training function: a tracker reports, and the whole state of an `Accelerator` is saved and loaded.

accelerator = Accelerator()
SpotuneTracker(accelerator, total_steps)
...
step = load_state(accelerator)  # after accelerator.prepare(...)
...
accelerator.log({"loss": loss}, step=step)
save_state(accelerator, step)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotune_train import checkpoint
from spotune_train.progress import session

try:
    from accelerate.tracking import GeneralTracker
except ModuleNotFoundError as error:
    raise ImportError(
        "spotune_train.accelerate needs Accelerate, which is not installed beside the trainer: install the package "
        "accelerate (pip install accelerate), in a cluster in the image of the job (cluster.image)"
    ) from error

if TYPE_CHECKING:
    from accelerate import Accelerator


class SpotuneTracker(GeneralTracker):  # type: ignore[misc]
    """Reports what `Accelerator.log` is given, and adds itself to the trackers of the accelerator.

    All workers have to call `log`, as they do in Accelerate's examples. Accelerate calls trackers in the main process
    alone, but workers report together. So in the other processes, this replaces the method of the accelerator.

    Args:
        accelerator: of the training function.
        total_steps: number of steps of the whole job, for the remaining time; None: it is not known.
    """

    name = "spotune"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, accelerator: Accelerator, total_steps: int | None = None) -> None:
        super().__init__()
        self._total_steps = total_steps
        self._kept: dict[str, Any] = {}
        if accelerator.is_main_process:
            accelerator.trackers.append(self)
        else:
            accelerator.log = self.log

    @property
    def tracker(self) -> None:
        """There is no run of another library behind it."""
        return

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report a step.

        Args:
            values: numbers by name; `loss` is that of status and curves.
            step: number of steps done; None: one more than at the last report. What is logged for a step that has been
                reported already is part of the next report.
            **kwargs: not used.
        """
        found = session("accelerate")
        self._kept |= values
        if step is not None and step == found.step:
            return
        reported, self._kept = self._kept, {}
        found.report(reported, step=step, total_steps=self._total_steps)


def save_state(accelerator: Accelerator, step: int, *, wait: bool = False) -> None:
    """Save what `Accelerator.save_state` saves, as `checkpoint.save` does. All workers call it together.

    Args:
        accelerator: with model, optimizer and what else is to be saved.
        step: number of steps done.
        wait: return once the checkpoint is durable.
    """
    checkpoint.save_with(step, lambda folder: accelerator.save_state(str(folder)), wait=wait)


def load_state(accelerator: Accelerator) -> int:
    """Load the newest checkpoint. All workers call it together, once model and optimizer are prepared.

    Returns:
        Number of steps done; 0 at the beginning.
    """
    found = checkpoint.latest()
    if found is None:
        return 0
    accelerator.load_state(str(Path(found.folder)))
    return found.step
