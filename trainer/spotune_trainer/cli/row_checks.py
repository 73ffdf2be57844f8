"""The check of a job's raw rows for `spotune validate`, which finds it by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from spotune.cli.row_checks import RowCheck
from spotune.errors import InfrastructureError, JobError, Problem
from spotune.job import FinetuneJob, PrepareSpec
from spotune_trainer.data.preparation.check import MAX_PROBLEMS, check_rows
from spotune_trainer.data.preparation.prepare import PrepareOptions
from spotune_trainer.models.pretrained import load_tokenizer


def check_sources(
    job: FinetuneJob, sources: Mapping[str, str], max_rows: int | None, report: Callable[[str, int], None]
) -> list[RowCheck]:
    """Check the rows of a job's raw sources as `spotune shard` does.

    Args:
        job: The job, with absolute paths.
        sources: Sources to read, by the path of their field in the job.
        max_rows: Rows to read of each source, from the start; None: all.
        report: Called with a source and the number of its rows that were read.

    Returns:
        One for each source. Sources that this machine cannot read, or for which it has no tokenizer, are not checked.
    """
    field = "spec.model.tokenizer" if job.spec.model.tokenizer else "spec.model.source"
    model = job.spec.model
    tokenizer_source = model.tokenizer or model.source
    if "://" not in tokenizer_source and not Path(tokenizer_source).exists():
        return _not_checked(sources, f"{tokenizer_source}, which has the tokenizer, is not on this machine")
    try:
        options = PrepareOptions.from_job(job)
    except JobError as error:
        return _refused(sources, _problem("spec.dataset", error))
    try:
        tokenizer = load_tokenizer(job)
    except InfrastructureError as error:
        return _not_checked(sources, str(error))
    except JobError as error:
        if model.token_secret_ref is not None:  # whose token this machine may lack
            return _not_checked(sources, str(error))
        return _refused(sources, _problem(field, error))
    found, raw = [], _raw_data(job)
    for path, source in sources.items():
        try:
            checked = check_rows([raw[path]], options, tokenizer, max_rows=max_rows, report=partial(report, source))
        except JobError as error:
            return _refused(sources, _problem("spec.dataset", error))
        except (InfrastructureError, OSError) as error:
            found.append(RowCheck(path, source, not_checked=str(error)))
            continue
        problems = [Problem(problem, path) for problem in checked.problems]
        if len(problems) == MAX_PROBLEMS:
            problems.append(
                Problem(f"has {MAX_PROBLEMS} problems in its first {checked.rows:,} rows: reading ended", path)
            )
        found.append(RowCheck(path, source, checked.rows, checked.complete, checked.left_out, problems=tuple(problems)))
    return found


def _raw_data(job: FinetuneJob) -> dict[str, PrepareSpec]:
    """The raw data of a job by the path of the field with its source."""
    dataset = job.spec.dataset
    found = {f"spec.dataset.mixture[{index}]": source.prepare for index, source in enumerate(dataset.mixture)}
    found["spec.dataset"] = dataset.prepare
    return {f"{path}.prepare.source": spec for path, spec in found.items() if spec is not None}


def _problem(field: str, error: JobError) -> Problem:
    """The problem of a field, whose name the message may begin with."""
    message = str(error)
    for name in (field, field.removeprefix("spec.")):
        message = message.removeprefix(f"{name}: ")
    return Problem(message, field)


def _not_checked(sources: Mapping[str, str], reason: str) -> list[RowCheck]:
    return [RowCheck(path, source, not_checked=reason) for path, source in sources.items()]


def _refused(sources: Mapping[str, str], problem: Problem) -> list[RowCheck]:
    """No source was read, for a reason that is no source's own."""
    path, source = next(iter(sources.items()))
    return [RowCheck(path, source, problems=(problem,))]
