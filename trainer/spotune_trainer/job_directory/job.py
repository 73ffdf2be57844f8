"""From a job file to a job directory to train in: what can be refused is refused before anything is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spotune.errors import JobError, Problem, UsageError
from spotune.fingerprint import changed_fields
from spotune.job import FinetuneJob
from spotune.job_file.load import SOURCE_FIELDS, parse_job, read_job_file, replace_fields, resolve_paths
from spotune.job_file.yaml_file import Document
from spotune_trainer import files
from spotune_trainer.evaluation.custom_metrics import FIELD, missing_functions
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger

HUB_TOKEN = "SPOTUNE_HUB_TOKEN"
"""Variable with the token of `output.hub`; where it is not there `HF_TOKEN` is taken."""
_GPU_DEVICES = "nvidia[0-9]*"
_NO_SECRETS = "there are no Secrets on one machine: set {} in the environment"
_STORE_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("GCS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_ACCOUNT_NAME"),
)


def read_job(file: Path, changes: Mapping[str, Any]) -> FinetuneJob:
    """The job of a file with the options of the command line in it, and absolute paths.

    Args:
        file: the YAML file; relative sources start at its folder.
        changes: new values by camelCase path.

    Raises:
        UsageError: there is no such file.
        JobError: it cannot be run: invalid, or something that it names is not there.
    """
    job, document = resolve_job(file, changes)
    missing = [
        replace(problem, file=str(file), line=document.line(tuple(problem.field.split("."))))
        for problem in (
            *_suspension(job),
            *missing_sources(job),
            *missing_secrets(job, os.environ),
            *_missing_functions(job),
        )
    ]
    if missing:
        raise JobError(problems=missing)
    return job


def resolve_job(file: Path, changes: Mapping[str, Any]) -> tuple[FinetuneJob, Document]:
    """As `read_job`, but whether the sources are there is not looked at; also the document, for its lines."""
    document = read_job_file(file)
    job = parse_job(document)
    count = changes.get("spec.workers.count")
    if count is not None and job.spec.workers.min > count:
        changes = {**changes, "spec.workers.min": count}
    job = resolve_paths(replace_fields(job, changes), file.absolute().parent)
    return job, document


def missing_sources(job: FinetuneJob) -> list[Problem]:
    """A problem for every source that is a path, with nothing there."""
    return [
        Problem(f"{source} does not exist", path)
        for path, source in _local_sources(job)
        if not Path(source).exists() and not _is_pattern_of_files(source)
    ]


def _suspension(job: FinetuneJob) -> list[Problem]:
    """A problem where nobody would ever wake the job up again."""
    reason = "a suspended job is not run: set it to false, or leave it out"
    return [Problem(reason, "spec.suspend")] if job.spec.suspend else []


def _missing_functions(job: FinetuneJob) -> list[Problem]:
    """A problem for every function of `training.evaluation.metrics` that is not there."""
    return [Problem(reason, f"spec.{FIELD}") for reason in missing_functions(job.spec.training.evaluation)]


def missing_secrets(job: FinetuneJob, environment: Mapping[str, str]) -> list[Problem]:
    """A problem for every Secret that the job names: on one machine the environment has to hold what is in it."""
    spec, found = job.spec, []
    if spec.model.token_secret_ref is not None and not environment.get("HF_TOKEN"):
        found.append(Problem(_NO_SECRETS.format("HF_TOKEN"), "spec.model.tokenSecretRef"))
    wandb = spec.tracking.wandb
    if wandb is not None and wandb.key_secret_ref is not None and not environment.get("WANDB_API_KEY"):
        found.append(Problem(_NO_SECRETS.format("WANDB_API_KEY"), "spec.tracking.wandb.keySecretRef"))
    hub = spec.output.hub
    token = environment.get(HUB_TOKEN) or environment.get("HF_TOKEN")
    if hub is not None and hub.token_secret_ref is not None and not token:
        found.append(Problem(_NO_SECRETS.format(HUB_TOKEN), "spec.output.hub.tokenSecretRef"))
    credentials = spec.dataset.credentials
    if credentials is not None and not any(environment.get(name) for name in _STORE_VARIABLES):
        reason = _NO_SECRETS.format("the store's own variables") + ", such as AWS_ACCESS_KEY_ID"
        found.append(Problem(reason, "spec.dataset.credentials"))
    elif credentials is not None and environment.get("S3_ENDPOINT_URL", "") != credentials.endpoint:
        reason = "AWS_ENDPOINT_URL and S3_ENDPOINT_URL have to be the same in the environment"
        found.append(Problem(reason, "spec.dataset.credentials.endpoint"))
    return found


def refuse_missing_gpus(job: FinetuneJob) -> None:
    """Refuse a job that needs more GPUs than this machine has; raises JobError."""
    _refuse_missing_gpus(job, len(list(Path("/dev").glob(_GPU_DEVICES))))


def check_directory(directory: JobDirectory, job: FinetuneJob) -> None:
    """Refuse a directory that this job cannot be trained in; makes nothing.

    Raises:
        UsageError: it cannot be written to, or is not a job directory.
        JobError: it holds the checkpoints of a job that trains something else.
    """
    _refuse_unusable(directory)
    check_meaning(directory, job)


def check_meaning(directory: JobDirectory, job: FinetuneJob) -> None:
    """Refuse a directory with the checkpoints of a job that trains something else; raises JobError."""
    earlier = job_of(directory)
    if earlier is not None and has_commits(directory):
        _refuse_other_meaning(directory, earlier, job)


def is_trained(directory: JobDirectory, job: FinetuneJob) -> bool:
    """Whether the model is trained as long as the job asks for."""
    result = files.read_json(directory.result)
    if result is None:
        return False
    if {"epochs", "maxSteps"} <= result.keys():
        return (result["epochs"], result["maxSteps"]) == training_length(job)
    earlier = job_of(directory)  # a result that does not say it is of the job in the directory
    return earlier is not None and training_length(earlier) == training_length(job)


def has_finished(directory: JobDirectory) -> bool:
    """Whether a driver has trained the model of the job that is in a directory, and had the time to say so."""
    job, result = job_of(directory), files.read_json(directory.result) or {}
    said = any(record["step"] == result.get("steps") for record in Ledger(directory).records("finished"))
    return said and job is not None and is_trained(directory, job)


def training_length(job: FinetuneJob) -> tuple[float | None, int | None]:
    """`epochs` and `maxSteps`: all of what is trained that may grow once there are checkpoints."""
    training = job.spec.training
    return training.epochs, training.max_steps


def put_job(directory: JobDirectory, job: FinetuneJob) -> None:
    """Put a job in a directory that `check_directory` let pass, and whose lock is held.

    A job that only runs longer than the one before goes on after that one's last step, so its result no longer counts.
    """
    earlier = job_of(directory)
    directory.logs.mkdir(parents=True, exist_ok=True)
    if earlier is not None and training_length(earlier) != training_length(job):
        directory.result.unlink(missing_ok=True)
    files.write_json(directory.job, job.model_dump(mode="json", by_alias=True, exclude_unset=True))


def job_of(directory: JobDirectory) -> FinetuneJob | None:
    """The job that was last put in a directory, None where there is none.

    Raises:
        JobError: it cannot be read.
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
    """Whether a checkpoint was ever committed that is still there."""
    return any(directory.checkpoints.glob("*/manifest.json"))


def _local_sources(job: FinetuneJob) -> list[tuple[str, str]]:
    """CamelCase path and value of every source that is a path."""
    content = job.model_dump(mode="json", by_alias=True)
    found = [(path, _value_at(content, path)) for path in SOURCE_FIELDS]
    return [(path, source) for path, source in found if source and "://" not in source]


def _is_pattern_of_files(source: str) -> bool:
    path = Path(source)
    return any(path.parent.glob(path.name)) if path.name else False


def _value_at(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _refuse_missing_gpus(job: FinetuneJob, there: int) -> None:
    workers = job.spec.workers
    if workers.gpus > 0 and there < workers.min_world_size:
        has = f"has {there}" if there else "has none"
        what = f"{workers.min_world_size} GPUs are needed (min x gpus), this machine {has}"
        remedy = "set workers.gpus to 0 to train on CPUs" if there == 0 else "lower workers.min or workers.gpus"
        raise JobError(problems=[Problem(f"{what}: {remedy}", "spec.workers")])


def _refuse_unusable(directory: JobDirectory) -> None:
    root = directory.root
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"{nearest} is a file: give another --directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest} cannot be written to: give another --directory, or change its permissions")
    ours = directory.job.exists() or directory.status.exists()
    if nearest == root and not ours and any(not path.name.startswith(".") for path in root.iterdir()):
        raise UsageError(f"{root} holds other files and no job: give an empty or a new --directory")


def _refuse_other_meaning(directory: JobDirectory, earlier: FinetuneJob, job: FinetuneJob) -> None:
    if changed := changed_fields(earlier, job):
        raise JobError(
            f"{directory.root} holds checkpoints of a job that trains something else: {', '.join(changed)} changed. "
            "Change it back to go on from them, or give another --directory to start anew"
        )
