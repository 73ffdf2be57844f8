"""The FinetuneJobs of a sweep's trials: its template with parameters set, validated as any job."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from spotune.custom_resource import API_VERSION
from spotune.errors import Problem
from spotune.job import KIND, FinetuneJob
from spotune.job_file.problems import describe_problems, dotted, parse_path
from spotune.job_file.yaml_file import Document
from spotune.sweep import FinetuneSweep


def trial_job(sweep: FinetuneSweep, number: int, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The FinetuneJob of a trial, and what is wrong with it.

    Args:
        sweep: The sweep.
        number: Number of the trial.
        parameters: Values by field of the job's spec, such as ``training.learningRate``.

    Returns:
        The object without a status, and the problems; their fields start with ``spec.``.
    """
    spec: dict[str, Any] = sweep.spec.template.spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    metadata = {"name": sweep.trial_name(number), "namespace": sweep.metadata.namespace}
    content = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    problems = [problem for path, value in parameters.items() if (problem := _set(spec, path, value)) is not None]
    if problems:
        return content, problems
    try:
        FinetuneJob.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        return content, describe_problems(error, Document(content), FinetuneJob)
    return content, []


def trial_problems(sweep: FinetuneSweep, document: Document) -> list[Problem]:
    """What is wrong with trials of a sweep: a parameter that is no field, or a value that the field cannot have.

    It tries every value of a list, and both ends of a range, each with the first values of the other parameters.
    Combinations of other values may still be invalid; such a trial counts as failed.
    """
    first = {path: parameter.extremes[0] for path, parameter in sweep.spec.parameters.items()}
    _, found = trial_job(sweep, 0, first)
    if found:
        return [_of_parameter(problem, first, document) for problem in found]
    return list(_problems_of_values(sweep, first, document))


def _problems_of_values(sweep: FinetuneSweep, first: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    for path, parameter in sweep.spec.parameters.items():
        for value in parameter.extremes[1:]:
            _, found = trial_job(sweep, 0, {**first, path: value})
            if found:
                yield _located(path, f"{value!r}: {_text(found[0], path)}", document)
                break


def _of_parameter(problem: Problem, parameters: Mapping[str, Any], document: Document) -> Problem:
    """A problem of a trial, at the parameter that it is about; at all parameters if it is about another field."""
    for path in parameters:
        field = f"spec.{path}"
        if problem.field == field or problem.field.startswith((f"{field}.", f"{field}[")):
            return _located(path, _text(problem, path), document)
        if field.startswith(f"{problem.field}."):  # a section on the way
            return _located(path, f"{problem.field.removeprefix('spec.')} {problem.message}", document)
    message = f"the first values give an invalid job: {problem.field.removeprefix('spec.')}: {problem.message}"
    place = ("spec", "parameters")
    return Problem(message, dotted(place), document.file, document.line(place))


def _text(problem: Problem, path: str) -> str:
    """The message, with the field if that is not the parameter's own."""
    own = problem.field == f"spec.{path}"
    return problem.message if own else f"{problem.field.removeprefix('spec.')}: {problem.message}"


def _located(path: str, message: str, document: Document) -> Problem:
    place = ("spec", "parameters", path)
    return Problem(message, dotted(place), document.file, document.line(place))


def _set(spec: dict[str, Any], path: str, value: Any) -> Problem | None:
    """Set a field of a spec, and create the sections on the way; returns why that is impossible."""
    *parents, name = parse_path(path)
    section: Any = spec
    for place, part in enumerate(parents):
        if isinstance(section, dict) and isinstance(part, str):
            section = section.setdefault(part, {})
        elif isinstance(section, list) and isinstance(part, int) and part < len(section):
            section = section[part]
        else:
            return Problem(f"{dotted(tuple(parents[: place + 1]))} is not in the template", f"spec.{path}")
    if not isinstance(section, dict):
        return Problem(f"{dotted(tuple(parents))} is no section of the template", f"spec.{path}")
    section[str(name)] = value
    return None
