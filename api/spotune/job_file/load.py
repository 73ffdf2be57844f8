"""From a YAML file to a FinetuneJob, with errors that name file, line, field, what was given and what is allowed."""

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
"""camelCase paths of everything that names a folder or file to read."""


def load_job(path: str | Path) -> FinetuneJob:
    """Reads one FinetuneJob from a YAML file; sources stay as they are written (see ``resolve_paths``).

    Raises:
        UsageError: There is no such file.
        JobError: It is not YAML, not one FinetuneJob, or something in it is wrong; ``problems`` lists everything.
    """
    return parse_job(read_job_file(path))


def read_job_file(path: str | Path) -> Document:
    """The YAML document of a job file, with the line of every field; its fields are not checked yet.

    Raises:
        UsageError: There is no such file.
        JobError: It is not YAML, or not one FinetuneJob.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        what = "is a directory; give the job file in it" if file.is_dir() else "does not exist"
        raise UsageError(f"{path}: {what}")
    return _single_job(read_documents(file), str(path))


def parse_job(document: Document) -> FinetuneJob:
    """Checks a document that ``read_job_file`` returned.

    Raises:
        JobError: Something in it is wrong; ``problems`` lists everything.
    """
    try:
        return FinetuneJob.model_validate(document.content, by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(problems=describe_problems(error, document)) from error


def _single_job(documents: list[Document], file: str) -> Document:
    """The only document of a file, if it is a FinetuneJob of our version."""
    if len(documents) != 1:
        kinds = ", ".join(str(document.kind or "no kind") for document in documents)
        what = f"holds {len(documents)} YAML documents ({kinds}); give one {KIND} per file" if documents else "is empty"
        raise JobError(problems=[Problem(what, file=file)])
    document = documents[0]
    if not isinstance(document.content, dict):
        found = "a list" if isinstance(document.content, list) else "a single value"
        what = f"is not a {KIND}: it holds {found}, not a mapping with apiVersion, kind, metadata and spec"
        raise JobError(problems=[Problem(what, file=file)])
    for field, expected in (("kind", KIND), ("apiVersion", API_VERSION)):
        given = document.content.get(field)
        if given != expected:
            found = f"is {given!r}" if field in document.content else "is missing"
            what = f"{found}; a job file says {field}: {expected}"
            raise JobError(problems=[Problem(what, field, file, document.line((field,)))])
    return document


def replace_fields(job: FinetuneJob, values: Mapping[str, Any]) -> FinetuneJob:
    """A job with some fields changed and everything checked again, for options such as ``--workers``.

    Args:
        job: The job; it is left as it is.
        values: New values by camelCase path, for example ``{"spec.training.maxSteps": 10}``.

    Raises:
        JobError: The result is not valid; the fields are named.
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
    """The job with every relative source made absolute; ``~`` is expanded, ``hf://`` and the like stay.

    Args:
        job: The job; it is left as it is.
        base: Folder of the job file, or root of the shared volume.
    """
    sources = {path: _value_at(job, path) for path in SOURCE_FIELDS}
    relative = {path: source for path, source in sources.items() if source and "://" not in source}
    absolute = {path: str(base.absolute() / Path(source).expanduser()) for path, source in relative.items()}
    return replace_fields(job, absolute)


def _value_at(job: FinetuneJob, path: str) -> Any:
    """The value of a field by its camelCase path; None if a section on the way is absent."""
    value: Any = job
    for alias in path.split("."):
        names = [name for name, field in type(value).model_fields.items() if field.alias == alias] if value else []
        value = getattr(value, names[0]) if names else None
    return value
