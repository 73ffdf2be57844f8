"""`job.json`: the job of a directory, and whether its model is trained."""

from __future__ import annotations

from pydantic import ValidationError

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger


def is_trained(directory: JobDirectory, job: FinetuneJob) -> bool:
    """Whether the directory has a result of the training length that the job asks for."""
    result = files.read_json(directory.result)
    if result is None:
        return False
    if {"epochs", "maxSteps"} <= result.keys():
        return (result["epochs"], result["maxSteps"]) == training_length(job)
    earlier = job_of(directory)  # an old result has no length: it belongs to the job in the directory
    return earlier is not None and training_length(earlier) == training_length(job)


def has_finished(directory: JobDirectory) -> bool:
    """Whether a driver has trained the directory's job to its end and recorded `finished` in the ledger."""
    job, result = job_of(directory), files.read_json(directory.result) or {}
    recorded = any(record.get("step") == result.get("steps") for record in Ledger(directory).records("finished"))
    return recorded and job is not None and is_trained(directory, job)


def training_length(job: FinetuneJob) -> tuple[float | None, int | None]:
    """`epochs` and `maxSteps`, the only settings of what is trained that may change once there are checkpoints."""
    training = job.spec.training
    return training.epochs, training.max_steps


def put_job(directory: JobDirectory, job: FinetuneJob) -> None:
    """Write a job to its directory. The caller has called `check_directory` and holds the lock.

    If the training length changes, the earlier result is deleted and training continues after its last step.
    """
    earlier = job_of(directory)
    directory.logs.mkdir(parents=True, exist_ok=True)
    if earlier is not None and training_length(earlier) != training_length(job):
        directory.result.unlink(missing_ok=True)
    files.write_json(directory.job, job.model_dump(mode="json", by_alias=True, exclude_unset=True))


def job_of(directory: JobDirectory) -> FinetuneJob | None:
    """The job in a directory, or None if there is none.

    Raises:
        JobError: `job.json` cannot be read by this version.
    """
    content = files.read_json(directory.job)
    if content is None:
        return None
    try:
        return FinetuneJob.model_validate(content)
    except ValidationError as error:
        raise JobError(
            f"{directory.job} was written by another version of spotune, or edited: give another --directory"
        ) from error


def has_commits(directory: JobDirectory) -> bool:
    """Whether the directory has a committed checkpoint."""
    return any(directory.checkpoints.glob("*/manifest.json"))
