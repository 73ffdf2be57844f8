"""What a training function reports of its progress, and what it learns of its worker group."""

from __future__ import annotations

from typing import Any

from spotune.errors import JobError
from spotune_trainer.commands.joining import join_command
from spotune_trainer.training_functions.session import Session, current_session


def report(step: int, loss: Any = None, *, total_steps: int | None = None, **metrics: Any) -> None:
    """Report that a step is done. All workers call it together.

    Args:
        step: number of steps done since the beginning of the job, ascending; steps may be left out.
        loss: a number, or a tensor with one element. That of rank 0 is shown.
        total_steps: number of steps of the whole job, for the remaining time; None: it is not known.
        metrics: more numbers by name; those of rank 0 become curves.

    Raises:
        JobError: the step is not later than the last one, or other workers report another one. If steps are short, a
            later call raises the latter.
    """
    reported = metrics if loss is None else {"loss": loss, **metrics}
    session("report").report(reported, step=step, total_steps=total_steps, may_save=False)


def notice() -> float | None:
    """Seconds until the worker group has to leave, the same on all workers.

    As of the last report. Reports of steps that take less than half a second do not wait for the other workers, so it
    may then be older by a quarter of a second, or by a report. None without a notice, and infinite without a deadline.
    The group leaves after its next checkpoint, so save one.
    """
    return session("notice").seconds_left


def session(function: str) -> Session:
    """The session of this process.

    Args:
        function: name of the calling function, for the error.

    Raises:
        JobError: this process is no worker of a job with code of the user.
    """
    found = session_or_none()
    if found is None:
        raise JobError(
            f"spotune_train.{function} works in the workers of a FinetuneJob alone: set training.function to the "
            "function that calls it, or training.command to the program, and start the job by spotune run or kubectl "
            "apply"
        )
    return found


def session_or_none() -> Session | None:
    """The session of this process; None if it is no worker of a job with code of the user."""
    return current_session() or join_command()
