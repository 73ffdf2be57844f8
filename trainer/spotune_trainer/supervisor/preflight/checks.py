"""The preflight checks of a job: whether it can run, determined on the head before the job holds any GPU.

A check returns one sentence with figures, or raises an error that includes the remedy. A failed check is repeated,
because a larger volume or an upload can fix it without a change of the job. Once there are checkpoints, checks that
passed are not repeated, so a restarted container trains at once. The checks must not import torch: the supervisor has
little memory beside the head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spotune.errors import SpotuneError, UsageError
from spotune.job import FinetuneJob
from spotune.job.training.metric import is_function
from spotune_trainer.bucket.client import open_bucket
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.bucket import check_bucket, measure_upload
from spotune_trainer.supervisor.preflight.mixtures import check_mixture
from spotune_trainer.supervisor.preflight.sources import (
    ModelFacts,
    check_data,
    check_harness,
    check_metrics,
    check_user_code,
    count_parameters,
    read_model,
)
from spotune_trainer.supervisor.preflight.storage import (
    StorageError,
    StorageNeed,
    check_commit_time,
    check_file_system,
    check_space,
    storage_need,
)
from spotune_trainer.supervisor.preflight.worker_memory import check_worker_memory, memory_limit

BUCKET = "bucket"
"""Name of the check of a bucket."""
NOTICE_SECONDS = "SPOTUNE_NOTICE_SECONDS"
"""Environment variable with the seconds between a spot notice and the end of a worker."""


@dataclass(frozen=True)
class Check:
    """One check of the preflight.

    Attributes:
        run: returns one sentence with figures. Raises SpotuneError or OSError with what is wrong and the remedy.
        needs: names of earlier checks; this one is skipped unless all of them have passed.
    """

    run: Callable[[], str]
    needs: tuple[str, ...] = ()


def checks_of(job: FinetuneJob, directory: JobDirectory, bucket: str = "") -> dict[str, Check]:
    """The checks of a job by name, in the order in which they run.

    Args:
        job: the job.
        directory: of the job.
        bucket: URL of the bucket that keeps it; empty: a volume does.
    """
    if bucket:
        storage = {BUCKET: Check(lambda: check_bucket(open_bucket(bucket)))}
    else:
        storage = {"storage-semantics": Check(lambda: check_file_system(directory.root))}
    if job.spec.training.has_user_code:
        return {**storage, "user-code": Check(lambda: check_user_code(job, directory))}
    found: list[ModelFacts] = []

    def model() -> str:
        found.append(read_model(job))
        return found[0].description

    def need() -> StorageNeed:
        assert found, "checks that need the size of the model run after it was read"
        return storage_need(job, found[0].parameters, directory)

    def memory() -> str:
        assert found, "checks that need the model's configuration run after it was read"
        return check_worker_memory(job, found[0].config)

    has_functions = any(map(is_function, job.spec.training.evaluation.metrics))
    metrics = {"metrics": Check(lambda: check_metrics(job))} if has_functions else {}
    if job.spec.training.evaluation.harness is not None:
        metrics["harness"] = Check(lambda: check_harness(job))
    check_sources = check_mixture if job.spec.dataset.mixture else check_data
    notice = os.environ.get(NOTICE_SECONDS)
    notice_seconds = float(notice) if notice else None
    if bucket:
        space: dict[str, Check] = {}  # only the disks of the workers matter
        upload: Callable[[int], float] | None = partial(_measure_upload_to, bucket)
    else:
        space = {"storage-space": Check(lambda: check_space(need(), directory.root), needs=("model",))}
        upload = None
    return {
        **storage,
        "model": Check(model),
        "data": Check(lambda: check_sources(job, directory)),
        **metrics,
        **({"worker-memory": Check(memory, needs=("model",))} if memory_limit(job) is not None else {}),
        **space,
        "commit-time": Check(
            lambda: check_commit_time(need(), directory.root, notice_seconds, upload=upload),
            needs=(*storage, "model"),
        ),
    }


def _measure_upload_to(url: str, num_bytes: int) -> float:
    """Bytes a second to a bucket that is opened by the check, so that its errors are those of the check."""
    return measure_upload(open_bucket(url), num_bytes)


def refuse_insufficient_space(directory: JobDirectory, job: FinetuneJob) -> None:
    """Refuse a new job on this machine if its checkpoints do not fit on the disk; for `spotune run`.

    Without this check the first commits would fail and a kill would lose the work. If the model's configuration cannot
    be read, the job is let through: the workers retry and report the reason. The size of what code of the user
    saves is not known.

    Raises:
        UsageError: the disk is too small.
    """
    if job.spec.training.has_user_code:
        return
    try:
        parameters = count_parameters(job)
    except (SpotuneError, OSError):
        return
    need = storage_need(job, parameters, directory)
    try:
        check_space(
            need, directory.root, "Free some space, give a --directory on a larger disk, or lower checkpoint.keep"
        )
    except StorageError as error:
        raise UsageError(f"{directory.root}: {error}") from error
