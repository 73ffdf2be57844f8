"""Loads a FinetuneJob, a ModelService or a FinetuneSweep from a YAML file.

Errors name file, line, field, the given value and the allowed values.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from spotune.custom_resource import API_VERSION
from spotune.errors import JobError, Problem, UsageError
from spotune.job import KIND, FinetuneJob
from spotune.job_file.problems import describe_problems, dotted, parse_path
from spotune.job_file.trials import trial_problems
from spotune.job_file.yaml_file import Document, FieldPath, read_documents
from spotune.service import SERVICE_KIND, ModelService
from spotune.sweep import SWEEP_KIND, FinetuneSweep

Resource = TypeVar("Resource", FinetuneJob, ModelService, FinetuneSweep)

SOURCE_FIELDS = (
    "spec.model.source",
    "spec.model.tokenizer",
    "spec.dataset.train.source",
    "spec.dataset.mixture[].train.source",
    "spec.dataset.mixture[].prepare.source",
    "spec.dataset.mixture[].eval.source",
    "spec.dataset.eval.source",
    "spec.dataset.prepare.source",
    "spec.training.code",
    "spec.training.codeFrom.archive.source",
    "spec.training.evaluation.sql.databases",
    "spec.training.evaluation.harness.includePath",
)
"""camelCase paths of all fields that contain a folder or file to read; `[]` stands for each item of a list."""


def load_job(path: str | Path) -> FinetuneJob:
    """Read one FinetuneJob from a YAML file. Sources stay as written (see ``resolve_paths``).

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, not exactly one FinetuneJob, or invalid; ``problems`` lists all errors.
    """
    return parse_job(read_job_file(path))


def load_service(path: str | Path) -> ModelService:
    """Read one ModelService from a YAML file.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, not exactly one ModelService, or invalid; ``problems`` lists all errors.
    """
    return parse_service(read_document_of_kind(path, SERVICE_KIND))


def load_sweep(path: str | Path) -> FinetuneSweep:
    """Read one FinetuneSweep from a YAML file.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, not exactly one FinetuneSweep, or invalid; ``problems`` lists all errors.
    """
    return parse_sweep(read_document_of_kind(path, SWEEP_KIND))


def load_resource(path: str | Path) -> FinetuneJob | ModelService | FinetuneSweep:
    """Read one FinetuneJob, ModelService or FinetuneSweep from a YAML file.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, not exactly one object of these kinds, or invalid; ``problems`` lists all.
    """
    return parse_resource(read_document_of_kind(path, KIND, SERVICE_KIND, SWEEP_KIND))


def read_job_file(path: str | Path) -> Document:
    """Read the YAML document of a job file, with the line of every field, without validating the fields.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, or not exactly one FinetuneJob.
    """
    return read_document_of_kind(path, KIND)


def read_document_of_kind(path: str | Path, *kinds: str) -> Document:
    """Read the only YAML document of a file, with the line of every field, without validating the fields.

    Args:
        path: The file.
        kinds: The kinds that the document may have; its apiVersion must be that of spotune.

    Raises:
        UsageError: The file does not exist.
        JobError: The file is not YAML, or not exactly one document of these kinds.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        message = "is a directory; pass the YAML file in it" if file.is_dir() else "does not exist"
        raise UsageError(f"{path}: {message}")
    return _single_document(read_documents(file), str(path), kinds)


def parse_job(document: Document) -> FinetuneJob:
    """Validate a document that ``read_job_file`` returned.

    Raises:
        JobError: The document is invalid; ``problems`` lists all errors.
    """
    return _parse(document, FinetuneJob)


def parse_service(document: Document) -> ModelService:
    """Validate a document of the kind ModelService.

    Raises:
        JobError: The document is invalid; ``problems`` lists all errors.
    """
    return _parse(document, ModelService)


def parse_sweep(document: Document) -> FinetuneSweep:
    """Validate a document of the kind FinetuneSweep, and jobs of its trials.

    Raises:
        JobError: The document or a trial is invalid; ``problems`` lists all errors.
    """
    sweep = _parse(document, FinetuneSweep)
    problems = trial_problems(sweep, document)
    if problems:
        raise JobError(problems=problems)
    return sweep


def parse_resource(document: Document) -> FinetuneJob | ModelService | FinetuneSweep:
    """Validate a document of any kind.

    Raises:
        JobError: The document is invalid; ``problems`` lists all errors.
    """
    if document.kind == SWEEP_KIND:
        return parse_sweep(document)
    return parse_service(document) if document.kind == SERVICE_KIND else parse_job(document)


def _parse(document: Document, model: type[Resource]) -> Resource:
    try:
        return model.model_validate(document.content, by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(problems=describe_problems(error, document, model)) from error


def _single_document(documents: list[Document], file: str, kinds: Sequence[str]) -> Document:
    """Return the only document of a file; raise JobError unless it has one of the kinds and our apiVersion."""
    allowed = _alternatives(kinds)
    if len(documents) != 1:
        found = ", ".join(str(document.kind or "no kind") for document in documents)
        message = (
            f"holds {len(documents)} YAML documents ({found}); give one {allowed} per file" if documents else "is empty"
        )
        raise JobError(problems=[Problem(message, file=file)])
    document = documents[0]
    if not isinstance(document.content, dict):
        found = "a list" if isinstance(document.content, list) else "a single value"
        message = f"is not a {allowed}: it holds {found}, not a mapping with apiVersion, kind, metadata and spec"
        raise JobError(problems=[Problem(message, file=file)])
    for field, expected in (("kind", kinds), ("apiVersion", (API_VERSION,))):
        given = document.content.get(field)
        if given not in expected:
            found = f"is {given!r}" if field in document.content else "is missing"
            message = f"{found}; expected {field}: {_alternatives(expected)}"
            raise JobError(problems=[Problem(message, field, file, document.line((field,)))])
    return document


def _alternatives(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def replace_fields(resource: Resource, values: Mapping[str, Any]) -> Resource:
    """Copy a job or service with some fields replaced, and validate it again; for options such as ``--workers``.

    Args:
        resource: The job or service; it is not modified.
        values: New values by camelCase path, for example ``{"spec.training.maxSteps": 10}``. An item of a list that
            exists already is named as ``spec.dataset.mixture[0].weight``.

    Raises:
        JobError: The result is invalid; ``problems`` lists all errors.
    """
    content = resource.model_dump(exclude_unset=True)
    for path, value in values.items():
        *parents, name = parse_path(path)
        section: Any = content
        for parent in parents:
            section = section[parent] if isinstance(parent, int) else section.setdefault(parent, {})
        section[name] = value
    return _parse(Document(content), type(resource))


def resolve_paths(job: FinetuneJob, base: Path) -> FinetuneJob:
    """Copy a job with all relative sources made absolute. ``~`` is expanded; URLs such as ``hf://`` stay.

    Args:
        job: The job; it is not modified.
        base: Folder of the job file, or root of the shared volume.
    """
    relative = {path: source for path, source in sources_of(job).items() if "://" not in source}
    absolute = {path: str(base.absolute() / Path(source).expanduser()) for path, source in relative.items()}
    return replace_fields(job, absolute)


def sources_of(job: FinetuneJob) -> dict[str, str]:
    """Every source that the job names, by its path: those of `SOURCE_FIELDS` that are set."""
    content = job.model_dump(mode="json")
    found = (each for field in SOURCE_FIELDS for each in _values_at(content, field.replace("[]", ".[]").split("."), ()))
    return {dotted(path): source for path, source in found if source}


def _values_at(content: Any, names: Sequence[str], path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
    """The values below `content` whose path has these names, where `[]` stands for each item of a list."""
    if not names:
        yield path, content
        return
    name, *inner = names
    if name == "[]":
        for index, item in enumerate(content or ()):
            yield from _values_at(item, inner, (*path, index))
    elif isinstance(content, Mapping):
        yield from _values_at(content.get(name), inner, (*path, name))
