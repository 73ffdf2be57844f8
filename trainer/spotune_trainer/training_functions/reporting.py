"""What every rank with code of the user does around it: logs, progress, and a record of its failure."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer.bucket.generation_logs import GenerationLogUpload
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.failures import describe, record_failure
from spotune_trainer.training.task import RankPlacement, WorkerTask
from spotune_trainer.user_code.fetch import with_code

logger = logging.getLogger("spotune.worker")


@contextmanager
def reporting(task: WorkerTask, place: RankPlacement) -> Iterator[tuple[FinetuneJob, ProgressReporter]]:
    """Log and report as a rank of a generation. An exception is logged and recorded, then raised."""
    logs, rank = task.logs, place.rank
    job = FinetuneJob.model_validate(task.job)
    logs.root.mkdir(parents=True, exist_ok=True)
    hang_timeout = job.spec.retry.hang_timeout.seconds
    upload = _log_upload(task, rank)
    with (
        upload or nullcontext(),
        logging_to_file(logs.worker(rank)),
        ProgressReporter(logs, rank, hang_timeout, upload=upload) as reporter,
    ):
        process = f"{socket.gethostname()}, process {os.getpid()}"
        start = task.restore or "the beginning"
        logger.info("rank %d of %d on %s: starts from %s", rank, place.world_size, process, start)
        try:
            yield with_code(job, task.job_directory, task.plan.get("code", "")), reporter
        except BaseException as error:
            logger.exception("rank %d failed", rank)
            record_failure(logs, describe(rank, error))
            raise


def _log_upload(task: WorkerTask, rank: int) -> GenerationLogUpload | None:
    """Uploads what the rank logs, if a bucket keeps the job."""
    bucket = bucket_of(task.job_directory)
    if bucket is None:
        return None
    make = GenerationLogUpload.of_command if task.has_command else GenerationLogUpload.of_rank
    return make(bucket, task.job_directory, task.logs, rank)


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers, also those of NumPy and PyTorch."""
    found = {}
    for name, value in metrics.items():
        number: object = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            found[str(name)] = float(number)
    return found
