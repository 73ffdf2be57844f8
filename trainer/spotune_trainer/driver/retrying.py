"""Applies the `retry` section of a job: whether and when another worker group starts."""

from __future__ import annotations

import time

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob
from spotune.retry import GiveUp, Retry, decide, when_gpu_hours_are_used
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.run_plan import RunPlan


def raise_if_gpu_hours_are_used(job: FinetuneJob, ledger: Ledger) -> None:
    """Raise a JobError if the worker groups that have ended used `retry.maxGpuHours`."""
    gpu_hours = ledger.worker_seconds() / 3600 if job.spec.workers.gpus else 0.0
    if (decision := when_gpu_hours_are_used(gpu_hours, job.spec.retry)) is not None:
        raise JobError(decision.reason)


def retry_after_failure(job: FinetuneJob, ledger: Ledger, plan: RunPlan, evaluation_batch: int | None = None) -> Retry:
    """When and how to retry after the last failure of the ledger.

    Args:
        job: as it is now.
        ledger: of the job.
        plan: of the group that failed.
        evaluation_batch: as for `RunPlan.use_less_memory`.

    Raises:
        JobError, InfrastructureError: the policy gives up.
    """
    raise_if_gpu_hours_are_used(job, ledger)
    keeps_layout = job.spec.execution.reproducible != "none" and evaluation_batch in (None, 1)
    decision = decide(
        ledger.failures_since_change() or ledger.failures()[-1:],  # the job may change meanwhile
        job.spec.retry,
        now=time.time(),
        can_use_less_memory=not keeps_layout and plan.use_less_memory(0, evaluation_batch) != plan,
    )
    if isinstance(decision, GiveUp):
        kind = JobError if decision.exit_code == JobError.exit_code else InfrastructureError
        raise kind(decision.reason)
    return decision
