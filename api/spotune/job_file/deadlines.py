"""Refuses deadlines that are in the past when a job is created."""

from spotune.errors import Problem
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
