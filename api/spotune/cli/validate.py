"""`spotune validate`: checks files of all kinds, and the rows that a job learns from."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from spotune.cli.hub_cache import HUB_HINT
from spotune.cli.row_checks import RowCheck, check_rows
from spotune.entry_points import find_import_problem
from spotune.errors import JobError, Problem, UsageError
from spotune.job import KIND, FinetuneJob
from spotune.job_file.deadlines import deadline_problems
from spotune.job_file.load import parse_resource, read_document_of_kind, resolve_paths, sources_of
from spotune.job_file.problems import parse_path
from spotune.job_file.yaml_file import Document
from spotune.service import SERVICE_KIND
from spotune.sweep import SWEEP_KIND, FinetuneSweep

_ALL = "all"


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE.yaml...", help="Files to check: FinetuneJobs, ModelServices, FinetuneSweeps."),
    ],
    rows: Annotated[
        str, typer.Option(metavar="N|all", help="Raw rows to check of each source of a job, from the start; 0: none.")
    ] = "1000",
    stores: Annotated[
        bool, typer.Option("--stores", help="Also check rows in stores. The files they are in are downloaded.")
    ] = False,
    output: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
) -> None:
    """Validate files of FinetuneJobs, ModelServices and FinetuneSweeps: fields, values, combinations, and raw rows.

    Rows of dataset.prepare and of a mixture that are on this machine are read and tokenized as by spotune shard. For
    each source the command says which rows were checked, and it says if the folder of the model is not here. Where
    training.code is a folder on this machine, the module and the name of training.function are looked for in it,
    without running them. Of a sweep, trials are checked with every value of a list and with both ends of each range,
    and no rows are read.

    Example: spotune validate job.yaml
    """
    max_rows = _max_rows(rows)
    for file in files:
        document = read_document_of_kind(file, KIND, SERVICE_KIND, SWEEP_KIND)
        found = parse_resource(document)
        content = {"file": str(file), "valid": True, "kind": found.kind, "name": found.metadata.name}
        lines = [f"{file}: valid ({found.metadata.name})"]
        if isinstance(found, FinetuneJob):
            _check_deadline(found, document)
            _check_function(found, document)
            checks = _check_rows(found, document, max_rows, stores=stores)
            content |= {"rows": [check.as_json() for check in checks]}
            if missing := _missing_model(found, document):
                content |= {"model": {"source": found.spec.model.source, "notChecked": missing}}
                lines.append(f"  spec.model.source: not checked: {missing}")
            lines += [f"  {check}" for check in checks]
        elif isinstance(found, FinetuneSweep):
            _check_deadline(found, document)
            content |= {"trials": found.spec.num_trials}
            lines = [f"{file}: valid ({found.metadata.name}, {found.spec.num_trials} trials)"]
        typer.echo(json.dumps(content) if output == "json" else "\n".join(lines))


def _max_rows(text: str) -> int | None:
    """The most rows to check of a source; None for all."""
    if text == _ALL:
        return None
    if not text.isdecimal():
        raise UsageError(f"--rows {text}: expected a whole number, or {_ALL}.")
    return int(text)


def _check_deadline(job: FinetuneJob | FinetuneSweep, document: Document) -> None:
    """Raise JobError for a deadline in the past, of a job or trials that would be created now."""
    problems = deadline_problems(job, time.time())
    if problems:
        raise JobError(problems=[_located(problem, document) for problem in problems])


def _check_function(job: FinetuneJob, document: Document) -> None:
    """Look for the training function of a job, if its code is a folder on this machine.

    Raises:
        JobError: the folder has no such module, or the module has no such name.
    """
    training = job.spec.training
    folder = Path(document.file).absolute().parent / training.code
    if not (training.function and training.code and folder.is_dir()):
        return
    if problem := find_import_problem(training.function, folder):
        reason = f"{training.function}: {problem}, looked for in {folder}: correct the name or spec.training.code"
        raise JobError(problems=[_located(Problem(reason, "spec.training.function"), document)])


def _missing_model(job: FinetuneJob, document: Document) -> str:
    """That a folder of the model is not on this machine; empty if it is, or if the job has no such folder."""
    resolved = resolve_paths(job, Path(document.file).absolute().parent)
    folder = sources_of(resolved).get("spec.model.source", "")
    if not folder or "://" in folder or Path(folder).exists():
        return ""
    return f"{folder} is not on this machine ({HUB_HINT})"


def _check_rows(job: FinetuneJob, document: Document, max_rows: int | None, *, stores: bool) -> list[RowCheck]:
    """Check the rows of a job.

    Raises:
        JobError: Rows, or what is needed to read them, are wrong; ``problems`` lists what was found in all sources.
    """
    checks = check_rows(job, Path(document.file).absolute().parent, max_rows, stores=stores)
    problems = [_located(problem, document) for check in checks for problem in check.problems]
    if problems:
        raise JobError(problems=problems)
    return checks


def _located(problem: Problem, document: Document) -> Problem:
    """The problem with file and line of its field."""
    return dataclasses.replace(problem, file=document.file, line=document.line(parse_path(problem.field)))
