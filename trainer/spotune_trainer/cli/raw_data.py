"""What commands share that read raw rows: their options, and the job that these and a job file describe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import ValidationError

from spotune.custom_resource import API_VERSION
from spotune.errors import JobError, UsageError
from spotune.job import KIND, FinetuneJob, PrepareSpec
from spotune.job_file.load import load_job, parse_job, replace_fields, resolve_paths
from spotune.job_file.yaml_file import Document

if TYPE_CHECKING:
    from spotune_trainer.data.preparation.inputs import RawInput

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT...", help="Files, folders, patterns or URLs; default: dataset.prepare or mixture of the job."
    ),
]
Source = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this source of the job's mixture. Default: all with raw rows.")
]
Config = Annotated[
    str | None, typer.Option(metavar="NAME", help="Configuration of a dataset at hf://. Default: the default one.")
]
Split = Annotated[str | None, typer.Option(metavar="NAME", help="Split of a dataset at hf://. Default: the only one.")]
Job = Annotated[
    Path | None, typer.Option(metavar="JOB.yaml", help="Take settings that are not given here from this job file.")
]
Tokenizer = Annotated[str | None, typer.Option(metavar="SOURCE", help="A folder, or hf://owner/name.")]
Task = Annotated[Literal["causal", "seq2seq"] | None, typer.Option(help="Kind of model. Default: causal.")]
Prompt = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Prompt: '{question}'.")]
Completion = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Text to learn: '{sql}'.")]
Chosen = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Preferred answer of a pair: '{chosen}'.")]
Rejected = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Other answer of a pair: '{rejected}'.")]
Query = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Text to embed: '{question}'.")]
Positive = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Text near to the query: '{passage}'.")]
Negative = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Text that is not near to it.")]
Text = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template of plain text.")]
Messages = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of chat messages.")]
Tools = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the tools of a chat.")]
TrainOn = Annotated[
    Literal["assistant", "last", "all"] | None,
    typer.Option(help="Text of a chat to learn: every answer (default), the last one, or everything."),
]
Label = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column with the label of the text, or whether the answer is desirable."),
]
Labels = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A label; repeat it for all, in the order of the outputs.")
]
LabelEachWord = Annotated[
    bool, typer.Option("--label-each-word", help="Text and label are columns with lists: words, and the label of each.")
]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Tokens per row. Default: 512.")]

_FIELDS: Final = {
    "tokenizer": "spec.model.tokenizer",
    "task": "spec.model.task",
    "prompt": "spec.dataset.prompt",
    "completion": "spec.dataset.completion",
    "chosen": "spec.dataset.chosen",
    "rejected": "spec.dataset.rejected",
    "query": "spec.dataset.query",
    "positive": "spec.dataset.positive",
    "negative": "spec.dataset.negative",
    "text": "spec.dataset.text",
    "label": "spec.dataset.label",
    "labels": "spec.dataset.labels",
    "label_each_word": "spec.training.objective",
    "messages": "spec.dataset.messages",
    "tools": "spec.dataset.tools",
    "train_on": "spec.dataset.trainOn",
    "max_skipped": "spec.dataset.maxSkipped",
    "keep": "spec.dataset.keep",
    "max_length": "spec.dataset.maxLength",
    "max_completion_length": "spec.dataset.maxCompletionLength",
    "packing": "spec.dataset.packing",
}
"""Field of a job by the option that replaces it."""


def read_settings(job: Path | None, **options: Any) -> FinetuneJob:
    """The job whose dataset is read: from the file, or a minimal one, changed by the command's options.

    Args:
        job: The job file.
        options: Values by the name of the option, see `_FIELDS`; None for options that were not given.

    Raises:
        UsageError: Neither a job file nor a tokenizer is given, or no row format.
        JobError: The job file or a value is wrong.
    """
    label_each_word = options.pop("label_each_word", False)
    if label_each_word:
        options["label_each_word"] = "tokenClassification"
    elif job is None and (options.get("label") or options.get("labels")):
        answers = options.get("completion") or options.get("messages")
        options["label_each_word"] = "kto" if answers and not options.get("labels") else "classification"
    given = {_FIELDS[name]: value for name, value in options.items() if value is not None}
    tokenizer = options["tokenizer"]
    if job is not None:
        return replace_fields(resolve_paths(load_job(job), job.absolute().parent), given)
    if tokenizer is None:
        raise UsageError("give --tokenizer, or --job with a job file that names a model")
    spec = {"model": {"source": tokenizer}, "dataset": {"train": {"source": "."}}, "training": {"epochs": 1}}
    content = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "raw-data"}, "spec": spec}
    if options.get("chosen") or options.get("rejected"):
        given["spec.training.objective"] = "dpo"  # which objective learns from pairs does not matter to their shards
    if options.get("query") or options.get("positive"):
        given["spec.training.objective"] = "embedding"
    settings = replace_fields(parse_job(Document(content)), given)
    if settings.spec.dataset.row_format is None:
        raise UsageError(
            "the columns to learn are missing: give --prompt with --completion, --text, --messages, --chosen with "
            "--rejected, or --query with --positive"
        )
    return settings


def find_sources(
    inputs: list[str] | None,
    job: FinetuneJob,
    only: str | None = None,
    *,
    config: str | None = None,
    split: str | None = None,
) -> dict[str, list[RawInput]]:
    """The raw files: those of the command, or else the job's, by the name of the mixture's source.

    Args:
        inputs: Files of the command; None or empty: those of the job.
        job: The job.
        only: Name of a source of the job's mixture; None: all.
        config: Configuration of the dataset, instead of the job's.
        split: Split of the dataset, instead of the job's.

    Returns:
        Without a mixture, one item whose name is empty.

    Raises:
        UsageError: There are none, or `config` or `split` does not fit them.
    """
    if inputs and only is not None:
        raise UsageError("--source is a source of the job's mixture: give either it or files to read")
    if inputs:
        return {"": [of_split(source, config, split) for source in inputs]}
    if job.spec.given_dataset is None:
        raise UsageError("--job: a job with code of the user has no dataset: give the files to read")
    found = _prepared_sources(job)
    chosen = found if only is None else {only: found[only]} if only and only in found else {}
    if len(chosen) > 1 and (config or split):
        raise UsageError("--config and --split are of one dataset: name the source of the job's mixture by --source")
    if chosen:
        return {
            name: [of_split(spec.source, config or spec.config, split or spec.split)] for name, spec in chosen.items()
        }
    named = [source.name for source in job.spec.dataset.mixture]
    if only in named:
        raise UsageError(f"dataset.mixture: source {only} has shards, which hold no raw rows: give one with prepare")
    if only is not None:
        known = f"has {', '.join(named)}" if named else "has no mixture"
        raise UsageError(f"--source {only}: the job {known}")
    where = "sources with prepare in dataset.mixture" if named else "dataset.prepare"
    raise UsageError(f"give the files to read, or --job with a job file that has {where}")


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Add to errors the name of the mixture's source that is read; nothing without a mixture."""
    try:
        yield
    except JobError as error:
        if not name:
            raise
        raise JobError(f"dataset.mixture, source {name}: {error}") from error


def of_split(source: str, config: str | None, split: str | None) -> RawInput:
    """A source of raw rows; of a dataset on the Hub, those of a configuration and split.

    Raises:
        UsageError: The source is no dataset on the Hub, or the name of the split is none.
    """
    if not config and not split:
        return source
    try:
        return PrepareSpec(source=source, config=config or "", split=split or "")
    except ValidationError as error:
        first = error.errors()[0]
        field = first.get("ctx", {}).get("field") or ".".join(map(str, first["loc"]))
        raise UsageError(f"{source}: {'--' if field in {'config', 'split'} else ''}{field} {first['msg']}") from error


def _prepared_sources(job: FinetuneJob) -> dict[str, PrepareSpec]:
    """As `prepared_sources` of the dataset, also where shards of the raw data are named beside it."""
    dataset = job.spec.dataset
    return dataset.prepared_sources or ({"": dataset.prepare} if dataset.prepare is not None else {})
