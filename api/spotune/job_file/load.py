"""Loads a FinetuneJob from a YAML file. Errors name file, line, field, the given value and the allowed values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spotune.errors import JobError, Problem, UsageError
from spotune.job import API_VERSION, KIND, FinetuneJob
from spotune.job_file.problems import describe_problems
from spotune.job_file.yaml_file import Document, read_documents

SOURCE_FIELDS = (
    "spec.model.source",
    "spec.model.tokenizer",
    "spec.dataset.train.source",
    "spec.dataset.eval.source",
    "spec.dataset.prepare.source",
    "spec.training.evaluation.sql.databases",
)
"""camelCase paths of all fields that contain a folder or file to read."""


def load_job(path: str | Path) -> FinetuneJob:
    """Read one FinetuneJob from a YAML file. Sources stay as written (see ``resolve_paths``).

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, not exactly one FinetuneJob, or invalid; ``problems`` lists all errors.
    """
    return parse_job(read_job_file(path))


def read_job_file(path: str | Path) -> Document:
    """Read the YAML document of a job file, with the line of every field, without validating the fields.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, or not exactly one FinetuneJob.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        message = "is a directory; pass the job file in it" if file.is_dir() else "does not exist"
        raise UsageError(f"{path}: {message}")
    return _single_job(read_documents(file), str(path))


def parse_job(document: Document) -> FinetuneJob:
    """Validate a document that ``read_job_file`` returned.

    Raises:
        JobError: The document is invalid; ``problems`` lists all errors.
    """
    try:
        return FinetuneJob.model_validate(document.content, by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(problems=describe_problems(error, document)) from error


def _single_job(documents: list[Document], file: str) -> Document:
    """Return the only document of a file; raise JobError unless it is a FinetuneJob with the supported apiVersion."""
    if len(documents) != 1:
        kinds = ", ".join(str(document.kind or "no kind") for document in documents)
        message = (
            f"holds {len(documents)} YAML documents ({kinds}); give one {KIND} per file" if documents else "is empty"
        )
        raise JobError(problems=[Problem(message, file=file)])
    document = documents[0]
    if not isinstance(document.content, dict):
        found = "a list" if isinstance(document.content, list) else "a single value"
        message = f"is not a {KIND}: it holds {found}, not a mapping with apiVersion, kind, metadata and spec"
        raise JobError(problems=[Problem(message, file=file)])
    for field, expected in (("kind", KIND), ("apiVersion", API_VERSION)):
        given = document.content.get(field)
        if given != expected:
            found = f"is {given!r}" if field in document.content else "is missing"
            message = f"{found}; expected {field}: {expected}"
            raise JobError(problems=[Problem(message, field, file, document.line((field,)))])
    return document


def replace_fields(job: FinetuneJob, values: Mapping[str, Any]) -> FinetuneJob:
    """Copy a job with some fields replaced, and validate it again; for options such as ``--workers``.

    Args:
        job: The job; it is not modified.
        values: New values by camelCase path, for example ``{"spec.training.maxSteps": 10}``.

    Raises:
        JobError: The result is invalid; ``problems`` lists all errors.
    """
    content = job.model_dump(exclude_unset=True)
    for path, value in values.items():
        *parents, name = path.split(".")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    try:
        return FinetuneJob.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(problems=describe_problems(error, Document(content))) from error


def resolve_paths(job: FinetuneJob, base: Path) -> FinetuneJob:
    """Copy a job with all relative sources made absolute. ``~`` is expanded; URLs such as ``hf://`` stay.

    Args:
        job: The job; it is not modified.
        base: Folder of the job file, or root of the shared volume.
    """
    sources = {path: _value_at(job, path) for path in SOURCE_FIELDS}
    relative = {path: source for path, source in sources.items() if source and "://" not in source}
    absolute = {path: str(base.absolute() / Path(source).expanduser()) for path, source in relative.items()}
    return replace_fields(job, absolute)


def _value_at(job: FinetuneJob, path: str) -> Any:
    """The value of a field by its camelCase path; None if one of its sections is absent."""
    value: Any = job
    for alias in path.split("."):
        names = [name for name, field in type(value).model_fields.items() if field.alias == alias] if value else []
        value = getattr(value, names[0]) if names else None
    return value
