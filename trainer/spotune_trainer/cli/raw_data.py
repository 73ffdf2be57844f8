"""What commands share that read raw rows: their options, and the job that these and a job file describe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from spotune.custom_resource import API_VERSION
from spotune.errors import UsageError
from spotune.job import KIND, FinetuneJob
from spotune.job_file.load import load_job, parse_job, replace_fields, resolve_paths
from spotune.job_file.yaml_file import Document

Inputs = Annotated[
    list[str] | None,
    typer.Argument(metavar="INPUT...", help="Files, folders, patterns or URLs; default: dataset.prepare of the job."),
]
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
Label = Annotated[str | None, typer.Option(metavar="TEMPLATE", help="Whether an answer is desirable: '{label}'.")]
Text = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template of plain text.")]
Messages = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of chat messages.")]
Tools = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the tools of a chat.")]
TrainOn = Annotated[
    Literal["assistant", "last", "all"] | None,
    typer.Option(help="Text of a chat to learn: every answer (default), the last one, or everything."),
]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Tokens per row. Default: 512.")]

_FIELDS: Final = {
    "tokenizer": "spec.model.tokenizer",
    "task": "spec.model.task",
    "prompt": "spec.dataset.prompt",
    "completion": "spec.dataset.completion",
    "chosen": "spec.dataset.chosen",
    "rejected": "spec.dataset.rejected",
    "label": "spec.dataset.label",
    "query": "spec.dataset.query",
    "positive": "spec.dataset.positive",
    "negative": "spec.dataset.negative",
    "text": "spec.dataset.text",
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
    if options.get("label"):
        given["spec.training.objective"] = "kto"
    if options.get("query") or options.get("positive"):
        given["spec.training.objective"] = "embedding"
    settings = replace_fields(parse_job(Document(content)), given)
    if settings.spec.dataset.row_format is None:
        raise UsageError(
            "the columns to learn are missing: give --prompt with --completion, --text, --messages, --chosen with "
            "--rejected, or --query with --positive"
        )
    return settings


def find_sources(inputs: list[str] | None, job: FinetuneJob) -> list[str]:
    """The raw files: those of the command, or else the job's.

    Raises:
        UsageError: There are none.
    """
    if inputs:
        return inputs
    if job.spec.dataset.prepare is None:
        raise UsageError("give the files to read, or --job with a job file that has dataset.prepare")
    return [job.spec.dataset.prepare.source]
