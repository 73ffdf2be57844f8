"""Refuses deadlines that are in the past when a job is created."""

from dataclasses import replace
from pathlib import Path

from spotune.errors import JobError, Problem
from spotune.job import FinetuneJob

DEADLINE_FIELD = "spec.deadline"


def deadline_problems(job: FinetuneJob, created: float) -> list[Problem]:
    """Why a job that is created now cannot have its deadline. A running job is not asked: its deadline may pass.

    Args:
        job: The job.
        created: Unix time of its creation.
    """
    problem = job.spec.deadline.problem(created) if job.spec.deadline is not None else ""
    return [Problem(problem, DEADLINE_FIELD)] if problem else []


def refuse_past_deadline(job: FinetuneJob, file: Path, created: float) -> None:
    """Raise JobError for a deadline in the past, of a job from this file that would be created at this Unix time."""
    problems = [replace(problem, file=str(file)) for problem in deadline_problems(job, created)]
    if problems:
        raise JobError(problems=problems)
