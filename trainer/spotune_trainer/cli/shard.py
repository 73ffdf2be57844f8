"""`spotune shard`: convert raw text files to tokenized MDS shards on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from spotune_trainer.cli import raw_data
from spotune_trainer.data.counts.tables import SUMMARY, table_rows, warnings

if TYPE_CHECKING:
    from spotune_trainer.data.preparation.prepare import PreparedDataset, PrepareProgress

Report = Callable[["PrepareProgress"], None]


def shard(
    directory: Annotated[
        str, typer.Option(metavar="DIR", help="Folder to write the dataset to, or its s3://, gs:// or az:// URL.")
    ],
    inputs: raw_data.Inputs = None,
    job: raw_data.Job = None,
    tokenizer: raw_data.Tokenizer = None,
    task: raw_data.Task = None,
    prompt: raw_data.Prompt = None,
    completion: raw_data.Completion = None,
    chosen: raw_data.Chosen = None,
    rejected: raw_data.Rejected = None,
    query: raw_data.Query = None,
    positive: raw_data.Positive = None,
    negative: raw_data.Negative = None,
    text: raw_data.Text = None,
    label: raw_data.Label = None,
    labels: raw_data.Labels = None,
    label_each_word: raw_data.LabelEachWord = False,
    messages: raw_data.Messages = None,
    tools: raw_data.Tools = None,
    train_on: raw_data.TrainOn = None,
    max_skipped: Annotated[
        int | None, typer.Option(min=0, help="Rows, and answers of chats, that may be left out. Default: 0.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Keep a column in the shards; repeatable.")
    ] = None,
    max_length: raw_data.MaxLength = None,
    max_completion_length: Annotated[
        int | None, typer.Option(min=0, help="Tokens of a seq2seq target. Default: as --max-length.")
    ] = None,
    packing: Annotated[
        bool | None, typer.Option(help="Put several documents, or pairs, into one row; causal only.")
    ] = None,
    source: raw_data.Source = None,
    config: raw_data.Config = None,
    split: raw_data.Split = None,
    eval_fraction: Annotated[
        float, typer.Option(min=0, max=0.99, help="Fraction to hold out: DIR/train and DIR/eval instead of DIR.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --eval-fraction.")] = 42,
    processes: Annotated[int, typer.Option(min=0, help="Number of processes; 0: one per core.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace shards of other input or options in DIR.")] = False,
    output: Annotated[Literal["text", "json"], typer.Option(help="json: the manifest, as one line.")] = "text",
) -> None:
    """Tokenize raw rows into MDS shards. The same command continues after a kill, and does nothing once it is done.

    Tokenize prompts and answers, and hold out 5 % of them:

    spotune shard train.jsonl --directory data/shards --tokenizer hf://google-t5/t5-small --task seq2seq
    --prompt "{question}" --completion "{sql}" --keep database --eval-fraction 0.05

    Pack plain text, or take everything but the folder from a job file:

    spotune shard "books/*.parquet" --directory data/books --tokenizer ./tokenizer --text body --packing

    spotune shard chats.jsonl --directory data/chats --job finetunejob.yaml

    Read a split of a dataset on the Hugging Face Hub:

    spotune shard hf://datasets/openai/gsm8k --config main --split test --directory data/eval --job finetunejob.yaml

    Write to a bucket, each part when it is complete, so that the shards may be larger than the disk:

    spotune shard "s3://my-bucket/raw/*.jsonl" --directory s3://my-bucket/shards --job finetunejob.yaml

    Each source of a mixture that has raw rows gets a folder of its own, DIR/NAME.
    """
    settings = raw_data.read_settings(
        job,
        tokenizer=tokenizer,
        task=task,
        prompt=prompt,
        completion=completion,
        chosen=chosen,
        rejected=rejected,
        query=query,
        positive=positive,
        negative=negative,
        text=text,
        label=label,
        labels=labels or None,
        label_each_word=label_each_word,
        messages=messages,
        tools=tools,
        train_on=train_on,
        max_skipped=max_skipped,
        keep=keep or None,
        max_length=max_length,
        max_completion_length=max_completion_length,
        packing=packing,
    )
    sources = raw_data.find_sources(inputs, settings, source, config=config, split=split)

    from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
    from spotune_trainer.models.pretrained import load_tokenizer

    options = dataclasses.replace(
        PrepareOptions.from_job(settings),
        eval_fraction=eval_fraction,
        eval_seed=seed,
        processes=processes,
        overwrite=overwrite,
    )
    loaded, datasets = load_tokenizer(settings), {}
    for name, files in sources.items():
        with raw_data.naming_source(name), _reporting(Console(stderr=True), name) as report:
            datasets[name] = prepare(files, _output(directory, name), options, loaded, report)
    if output == "json":
        shown = {name: _json(dataset) for name, dataset in datasets.items()}
        typer.echo(json.dumps(shown.get("", {"directory": _output(directory, ""), "sources": shown})))
        return
    for dataset in datasets.values():
        _print_summary(dataset, Console())
    if len(datasets) > 1:
        _print_total(datasets, Console())


def _output(directory: str, name: str) -> str:
    """Where the dataset of one source of a mixture is written to; without a name, the only dataset."""
    if "://" in directory:
        return f"{directory.rstrip('/')}/{name}".rstrip("/")
    return str(Path(directory).absolute() / name)


def _json(dataset: PreparedDataset) -> dict[str, Any]:
    return {"directory": dataset.place, "reused": dataset.reused, **dataset.manifest}


def _print_total(datasets: Mapping[str, PreparedDataset], console: Console) -> None:
    """One row for each source of a mixture and one for all, with the counts of all splits."""
    table = Table("source", *SUMMARY)
    for column in table.columns[1:]:
        column.justify = "right"
    counts = {
        name: [sum(split.get(key, 0) for split in dataset.manifest["splits"].values()) for key in SUMMARY.values()]
        for name, dataset in datasets.items()
    }
    for name, numbers in counts.items():
        table.add_row(name, *(f"{number:,}" for number in numbers))
    table.add_row("all", *(f"{sum(numbers):,}" for numbers in zip(*counts.values(), strict=True)), style="bold")
    console.print(table)


@contextmanager
def _reporting(console: Console, source: str) -> Iterator[Report]:
    """Show a bar in a terminal, and one line for each tenth of the input elsewhere, with the mixture's source."""
    if not console.is_terminal:
        yield _Lines(console, source)
        return
    columns = (
        TextColumn(f"Tokenizing {source}".rstrip()),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rows]} rows"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None, rows="0")
        yield lambda done: bar.update(
            task, completed=done.bytes_done, total=done.bytes_total, rows=f"{done.documents:,}"
        )


class _Lines:
    """Prints the progress once for each tenth of the input."""

    def __init__(self, console: Console, source: str) -> None:
        self._console = console
        self._activity = f"tokenizing {source}".rstrip()
        self._tenths = 0

    def __call__(self, done: PrepareProgress) -> None:
        tenths = 10 * done.bytes_done // max(done.bytes_total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            part = f"part {done.parts_done} of {done.parts_total}"
            self._console.print(f"{self._activity}: {10 * tenths} % ({part}, {done.documents:,} rows)", highlight=False)


def _print_summary(dataset: PreparedDataset, console: Console) -> None:
    state = "existed already" if dataset.reused else "is written"
    splits = dataset.manifest["splits"]
    console.print(f"{dataset.place} {state}", highlight=False, soft_wrap=True)
    table = Table("", *(splits if len(splits) > 1 else ["rows"]))
    for column in table.columns[1:]:
        column.justify = "right"
    for title, values in table_rows(list(splits.values())):
        table.add_row(title, *values)
    table.add_row("median tokens of a row", *(f"{counts['inputTokens']['p50']:,}" for counts in splits.values()))
    console.print(table)
    _print_warnings(dataset, partial(console.print, style="yellow", highlight=False, soft_wrap=True))


def _print_warnings(dataset: PreparedDataset, warn: Callable[[str], None]) -> None:
    longest = dataset.manifest["options"]["text"]["maxLength"]
    for warning in dataset.manifest.get("warnings", ()):
        warn(f"{warning}.")
    for split, counts in dataset.manifest["splits"].items():
        for warning in warnings(counts, longest):
            warn(f"{split}: {warning}")
