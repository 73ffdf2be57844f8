"""Refuses deadlines that are in the past when a job is created."""

from dataclasses import replace
from pathlib import Path

from spotune.errors import JobError, Problem
from spotune.job import FinetuneJob
from spotune.sweep import FinetuneSweep

DEADLINE_FIELD = "spec.deadline"
_OF_TRIALS = "spec.template.spec.deadline"


def deadline_problems(job: FinetuneJob | FinetuneSweep, created: float) -> list[Problem]:
    """Why a job that is created now cannot have its deadline. A running job is not asked: its deadline may pass.

    Args:
        job: The job; or a sweep, whose trials have the deadline of its template.
        created: Unix time of its creation.
    """
    if isinstance(job, FinetuneSweep):
        field, deadline = _OF_TRIALS, job.spec.template.spec.deadline
    else:
        field, deadline = DEADLINE_FIELD, job.spec.deadline
    problem = deadline.problem(created) if deadline is not None else ""
    return [Problem(problem, field)] if problem else []


def refuse_past_deadline(job: FinetuneJob | FinetuneSweep, file: Path, created: float) -> None:
    """Raise JobError for a deadline in the past, of what is in this file and would be created at this Unix time."""
    problems = [replace(problem, file=str(file)) for problem in deadline_problems(job, created)]
    if problems:
        raise JobError(problems=problems)
