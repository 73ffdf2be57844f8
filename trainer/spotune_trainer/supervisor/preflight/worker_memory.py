"""Check of the memory of workers without GPUs against their limit, before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES
from spotune.plan.execution import resolve_minimum
from spotune.plan.layout import ModelTooLargeError
from spotune.units.quantities import Quantity


def memory_limit(job: FinetuneJob) -> Quantity | None:
    """Memory of a worker pod without GPUs; None if the job does not limit it, or has workers with GPUs."""
    workers = job.spec.workers
    return None if workers.gpus else workers.resources.limits.get("memory")


def check_worker_memory(job: FinetuneJob, config: Mapping[str, Any]) -> str:
    """Check that the model fits on the workers; call it only for a job with a `memory_limit`.

    Args:
        job: the job.
        config: the model's `config.json`.

    Returns:
        One sentence with the smallest number of workers.

    Raises:
        JobError: it does not fit on the minimum of workers, or with `workers.min: auto` on all of them.
    """
    limit = memory_limit(job)
    assert limit is not None, "the job limits the memory of its workers"
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return f"the memory that a {config.get('model_type')} model needs is not computed"
    try:
        found = resolve_minimum(config, job, int(limit.value))
    except ModelTooLargeError as error:
        field = "spec.workers.count" if job.spec.workers.min == "auto" else "spec.workers.min"
        raise JobError(f"{error} Raise spec.workers.resources.limits.memory ({limit}) or {field}.") from error
    return f"the model fits on {found.world_size} of {job.spec.workers.count} workers: {found.execution.reason}"
