"""Admission of a job: read its file, and reject a job or a directory before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotune.errors import JobError, Problem, UsageError
from spotune.fingerprint import changed_fields
from spotune.job import CredentialsSpec, FinetuneJob
from spotune.job.output import HUB_TOKEN
from spotune.job.training.code_source import GIT_TOKEN
from spotune.job_file.load import parse_job, read_job_file, replace_fields, resolve_paths, sources_of
from spotune.job_file.problems import parse_path
from spotune.job_file.yaml_file import Document
from spotune_trainer.bucket.link import link_of
from spotune_trainer.commands.locate import missing_user_code
from spotune_trainer.evaluation import harness
from spotune_trainer.evaluation.custom_metrics import FIELD, missing_functions
from spotune_trainer.job_directory.job import has_commits, job_of
from spotune_trainer.job_directory.layout import JobDirectory

_GPU_DEVICES = "nvidia[0-9]*"

_NO_SECRETS = "Secrets need a cluster; on one machine set {} in the environment"

_NO_CONFIG_MAP = "a ConfigMap needs a cluster: on one machine, set training.code to a folder with the files"

_STORE_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("GCS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_ACCOUNT_NAME"),
    "AZURE_STORAGE_CONNECTION_STRING",
)


def read_job(file: Path, changes: Mapping[str, Any]) -> FinetuneJob:
    """The job of a file, for a run on this machine: with the command line's options and absolute paths.

    Args:
        file: the YAML file; relative sources are relative to its folder.
        changes: new values by camelCase path.

    Raises:
        UsageError: the file does not exist.
        JobError: the job is invalid or suspended, or a source, a Secret or a function that it names is missing.
    """
    job, document = resolve_job(file, changes)
    missing = [
        replace(problem, file=str(file), line=document.line(parse_path(problem.field)))
        for problem in (
            *_suspension(job),
            *missing_sources(job),
            *missing_secrets(job, os.environ),
            *_missing_functions(job),
            *_missing_harness(job),
        )
    ]
    if missing:
        raise JobError(problems=missing)
    return job


def resolve_job(file: Path, changes: Mapping[str, Any]) -> tuple[FinetuneJob, Document]:
    """The job as in `read_job` but without checking what it names, and its document with the line numbers."""
    document = read_job_file(file)
    job = parse_job(document)
    count = changes.get("spec.workers.count")
    if count is not None and job.spec.workers.min_count > count:
        changes = {**changes, "spec.workers.min": count}
    job = resolve_paths(replace_fields(job, changes), file.absolute().parent)
    return job, document


def missing_sources(job: FinetuneJob) -> list[Problem]:
    """A problem for each source that is a local path and does not exist."""
    return [
        Problem(f"{source} does not exist", path)
        for path, source in _local_sources(job)
        if not Path(source).exists() and not _is_pattern_of_files(source)
    ]


def _suspension(job: FinetuneJob) -> list[Problem]:
    """A problem if the job is suspended: on one machine nothing would resume it."""
    reason = "a suspended job is not run: set suspend to false, or leave it out"
    return [Problem(reason, "spec.suspend")] if job.spec.suspend else []


def _missing_functions(job: FinetuneJob) -> list[Problem]:
    """A problem for each function of `training.evaluation.metrics` that is missing, and for code of the user."""
    found = [Problem(reason, f"spec.{FIELD}") for reason in missing_functions(job.spec.training.evaluation)]
    code_from = job.spec.training.code_from
    if code_from is not None:  # it is read once the run has a folder
        problem = Problem(_NO_CONFIG_MAP, "spec.training.codeFrom.configMap") if code_from.config_map else None
    else:
        problem = missing_user_code(job)
    return [*found, problem] if problem else found


def _missing_harness(job: FinetuneJob) -> list[Problem]:
    """A problem if the job needs lm-evaluation-harness, and it is not installed."""
    reason = harness.missing_package() if job.spec.training.evaluation.harness is not None else None
    return [Problem(reason, f"spec.{harness.FIELD}")] if reason else []


def missing_secrets(job: FinetuneJob, environment: Mapping[str, str]) -> list[Problem]:
    """A problem for each Secret that the job names and whose content is not in the environment of this machine."""
    spec, found = job.spec, []
    model, dataset = spec.given_model, spec.given_dataset
    if model is not None and model.token_secret_ref is not None and not environment.get("HF_TOKEN"):
        found.append(Problem(_NO_SECRETS.format("HF_TOKEN"), "spec.model.tokenSecretRef"))
    wandb = spec.tracking.wandb
    if wandb is not None and wandb.key_secret_ref is not None and not environment.get("WANDB_API_KEY"):
        found.append(Problem(_NO_SECRETS.format("WANDB_API_KEY"), "spec.tracking.wandb.keySecretRef"))
    hub = spec.output.hub
    token = environment.get(HUB_TOKEN) or environment.get("HF_TOKEN")
    if hub is not None and hub.token_secret_ref is not None and not token:
        found.append(Problem(_NO_SECRETS.format(HUB_TOKEN), "spec.output.hub.tokenSecretRef"))
    code_from = spec.training.code_from
    git = code_from.git if code_from is not None else None
    if git is not None and git.token_secret_ref is not None and not environment.get(GIT_TOKEN):
        found.append(Problem(_NO_SECRETS.format(GIT_TOKEN), "spec.training.codeFrom.git.tokenSecretRef"))
    of_stores = {
        "spec.dataset.credentials": dataset.credentials if dataset is not None else None,
        "spec.storage.credentials": spec.storage.credentials,
    }
    for field, credentials in of_stores.items():
        if credentials is not None:
            found += _missing_store(field, credentials, environment)
    return found


def _missing_store(field: str, credentials: CredentialsSpec, environment: Mapping[str, str]) -> list[Problem]:
    """A problem if the environment has no access to an object store, or another endpoint."""
    if not any(environment.get(name) for name in _STORE_VARIABLES):
        return [Problem(_NO_SECRETS.format("the variables of the object store, such as AWS_ACCESS_KEY_ID,"), field)]
    if environment.get("S3_ENDPOINT_URL", "") != credentials.endpoint:
        reason = "set AWS_ENDPOINT_URL and S3_ENDPOINT_URL to this value in the environment"
        return [Problem(reason, f"{field}.endpoint")]
    return []


def refuse_missing_gpus(job: FinetuneJob) -> None:
    """Raise JobError if the job needs more GPUs than this machine has."""
    _refuse_missing_gpus(job, len(list(Path("/dev").glob(_GPU_DEVICES))))


def check_directory(directory: JobDirectory, job: FinetuneJob) -> None:
    """Check that the job can be trained in a directory; writes nothing.

    Raises:
        UsageError: the directory cannot be written to, or is not a job directory.
        JobError: it holds checkpoints of a job with another fingerprint.
    """
    _check_usable(directory)
    check_fingerprint(directory, job)


def check_fingerprint(directory: JobDirectory, job: FinetuneJob) -> None:
    """Raise JobError if the directory holds checkpoints of a job that trains something else."""
    earlier = job_of(directory)
    if earlier is not None and has_commits(directory):
        _check_same_fingerprint(directory, earlier, job)


def _local_sources(job: FinetuneJob) -> list[tuple[str, str]]:
    """CamelCase path and value of each source that is a local path."""
    return [(path, source) for path, source in sources_of(job).items() if "://" not in source]


def _is_pattern_of_files(source: str) -> bool:
    path = Path(source)
    return any(path.parent.glob(path.name)) if path.name else False


def _refuse_missing_gpus(job: FinetuneJob, available: int) -> None:
    workers = job.spec.workers
    if workers.gpus > 0 and available < workers.min_world_size:
        has = f"has {available}" if available else "has none"
        what = f"{workers.min_world_size} GPUs are needed (min x gpus), this machine {has}"
        remedy = "set workers.gpus to 0 to train on CPUs" if available == 0 else "lower workers.min or workers.gpus"
        raise JobError(problems=[Problem(f"{what}: {remedy}", "spec.workers")])


def _check_usable(directory: JobDirectory) -> None:
    root = directory.root
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"{nearest} is a file: give another --directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest} cannot be written to: give another --directory, or change its permissions")
    is_job_directory = any(path.exists() for path in (directory.job, directory.status, directory.bucket))
    if nearest == root and not is_job_directory and any(map(_is_foreign, root.iterdir())):
        raise UsageError(f"{root} holds other files and no job: give an empty or a new --directory")


def _is_foreign(path: Path) -> bool:
    """Whether neither a file system nor a preflight that ended early has put this into the folder of a new job."""
    return not path.name.startswith(".") and path != JobDirectory(path.parent).code_source.parent


def _check_same_fingerprint(directory: JobDirectory, earlier: FinetuneJob, job: FinetuneJob) -> None:
    if changed := changed_fields(earlier, job):
        link = link_of(directory)
        place, option = (directory.root, "--directory") if link is None else (link.url, "storage.bucket")
        raise JobError(
            f"{place} holds checkpoints of a job that trains something else: {', '.join(changed)} changed. "
            f"Change it back to continue from them, or give another {option} to start over"
        )
