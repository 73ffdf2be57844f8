"""`spotune data`: look at raw rows before they become shards."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotune_trainer.cli import raw_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotune_trainer.data.preparation.lengths import DatasetLengths, LengthSummary
    from spotune_trainer.data.preparation.preview import RowPreview, Span

data = typer.Typer(help="Look at raw rows.", no_args_is_help=True)

_TRAINED, _CONTEXT = "bold green", "dim"
_BAR_WIDTH = 40


@data.callback()
def _data() -> None:
    """Look at raw rows."""


@data.command()
def show(
    row: Annotated[int, typer.Argument(min=1, metavar="ROW", help="Number of the row, from 1.")],
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
    max_length: raw_data.MaxLength = None,
    source: raw_data.Source = None,
    config: raw_data.Config = None,
    split: raw_data.Split = None,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: the spans of the row and what becomes of its turns.")
    ] = "text",
) -> None:
    """Print a row as the model sees it: green what it is trained to write, grey what it only reads.

    spotune data show 3 --job job.yaml

    spotune data show 1 chats.jsonl --tokenizer hf://Qwen/Qwen3-0.6B --messages messages --output json

    Of a mixture, the row of each source. Where colours are not shown, ⟦ and ⟧ enclose what is trained.
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
        max_length=max_length,
    )
    sources = raw_data.find_sources(inputs, settings, source, config=config, split=split)

    from spotune_trainer.data.preparation.prepare import PrepareOptions
    from spotune_trainer.data.preparation.preview import preview_row
    from spotune_trainer.models.pretrained import load_tokenizer

    options, loaded = PrepareOptions.from_job(settings).text, load_tokenizer(settings)
    previews = {}
    for name, files in sources.items():
        with raw_data.naming_source(name):
            previews[name] = preview_row(files, row, options, loaded)
    if output == "json":
        shown = {name: _preview_json(preview) for name, preview in previews.items()}
        typer.echo(json.dumps(shown.get("", {"sources": shown}), ensure_ascii=False))
        return
    for name, preview in previews.items():
        _print_source(name, Console())
        _print(preview, Console())


@data.command()
def stats(
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
    max_length: raw_data.MaxLength = None,
    source: raw_data.Source = None,
    config: raw_data.Config = None,
    split: raw_data.Split = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Read only so many rows of each source, from the start.")
    ] = None,
    output: Annotated[Literal["text", "json"], typer.Option(help="json: all numbers, as one line.")] = "text",
) -> None:
    """Show how long rows are, in tokens, and what maximum lengths would cut. Of a mixture by source, and in total.

    spotune data stats --job job.yaml

    spotune data stats chats.jsonl --tokenizer hf://Qwen/Qwen3-0.6B --messages messages --rows 10000 --output json
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
        max_length=max_length,
    )
    sources = raw_data.find_sources(inputs, settings, source, config=config, split=split)

    from spotune_trainer.data.preparation.lengths import measure_sources
    from spotune_trainer.data.preparation.prepare import PrepareOptions
    from spotune_trainer.models.pretrained import load_tokenizer

    options, loaded = PrepareOptions.from_job(settings).text, load_tokenizer(settings)
    with Console(stderr=True).status("reading rows") as status:
        lengths = measure_sources(
            sources, options, loaded, max_rows=rows, report=lambda count: status.update(f"{count:,} rows")
        )
    if output == "json":
        shown = {name: _json(of_source) for name, of_source in lengths.by_source.items()}
        typer.echo(json.dumps(shown[""] if "" in shown else {"sources": shown, "total": _json(lengths.total)}))
        return
    for name, of_source in lengths.by_source.items():
        _print_source(name, Console())
        _print_lengths(of_source, Console())
    if len(lengths.by_source) > 1:
        Console().print("\n[bold]all sources[/bold]")
        _print_lengths(lengths.total, Console())


def _print_source(name: str, console: Console) -> None:
    """A heading for a source of a mixture; nothing without a mixture."""
    if name:
        console.print(f"\n[bold]source {name}[/bold]", highlight=False)


def _preview_json(preview: RowPreview) -> dict[str, Any]:
    names = {"trained_tokens": "trainedTokens", "cut_tokens": "cutTokens", "rejected_spans": "rejectedSpans"}
    return {names.get(name, name): value for name, value in dataclasses.asdict(preview).items()}


def _print(preview: RowPreview, console: Console) -> None:
    counts = f"{preview.tokens:,} tokens, {preview.trained_tokens:,} of them trained"
    cut = f", {preview.cut_tokens:,} more cut" if preview.cut_tokens else ""
    console.print(f"{preview.location}: {counts}{cut}", highlight=False, soft_wrap=True)
    documents = {"chosen": preview.spans, "rejected": preview.rejected_spans} | dict(preview.texts)
    for name, spans in documents.items():
        if not spans:
            continue
        if preview.rejected_spans or preview.texts:
            console.print(f"{name}:", highlight=False)
        console.print(_rendered(spans, marked=not console.color_system), soft_wrap=True)
    if preview.labels:
        console.print(f"label: {' '.join(preview.labels)}", highlight=False, soft_wrap=True)
    if preview.desirable is not None:
        console.print("desirable" if preview.desirable else "undesirable", highlight=False)
    for turn, outcome in preview.turns.items():
        if outcome != "trained":
            console.print(f"message {turn}: {outcome}", style="yellow", highlight=False)
    for problem in preview.problems:
        console.print(problem, style="red", highlight=False, soft_wrap=True)


def _rendered(spans: Sequence[Span], *, marked: bool) -> Text:
    """The text of spans: coloured by what is trained on; if `marked`, with brackets around it."""
    rendered = Text()
    for span in spans:
        shown = f"⟦{span.text}⟧" if span.trained and marked else span.text
        rendered.append(shown, _TRAINED if span.trained else _CONTEXT)
    return rendered


def _json(lengths: DatasetLengths) -> dict[str, Any]:
    def camel_case(name: str) -> str:
        first, *others = name.split("_")
        return first + "".join(other.capitalize() for other in others)

    return dataclasses.asdict(
        lengths, dict_factory=lambda items: {camel_case(name): value for name, value in items if value is not None}
    )


def _print_lengths(lengths: DatasetLengths, console: Console) -> None:
    write = partial(console.print, highlight=False, soft_wrap=True)
    write(f"{lengths.rows:,} rows, {lengths.duplicates:,} of them with the text of a row before")
    parts = {"rows": lengths.input} if lengths.target is None else {"inputs": lengths.input, "targets": lengths.target}
    for name, summary in parts.items():
        loss = f", {summary.trained_tokens:,} of them trained" if lengths.target is None else ""
        percentiles = ", ".join(f"{key} {length:,}" for key, length in summary.percentiles.items())
        write(f"\n[bold]{name}[/bold]: {summary.tokens:,} tokens{loss}; mean {summary.mean:,}, {percentiles}")
        _print_histogram(summary, console)
        _print_cuts(summary, console, trained=lengths.target is None)


def _print_histogram(summary: LengthSummary, console: Console) -> None:
    """A bar for each power of two."""
    most = max(summary.histogram.values())
    first, last = min(summary.histogram), max(summary.histogram)
    total = sum(summary.histogram.values())
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH)
    table.add_column(justify="right")
    table.add_column()
    bound = first
    while bound <= last:
        count = summary.histogram.get(bound, 0)
        holds_limit = summary.limit is not None and bound // 2 < summary.limit <= bound
        table.add_row(
            f"{bound // 2 + 1:,}-{bound:,}",
            "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else ""),
            f"{count / total:.1%}",
            f"← maximum length {summary.limit:,}" if holds_limit else "",
        )
        bound *= 2
    console.print(table)


def _print_cuts(summary: LengthSummary, console: Console, *, trained: bool) -> None:
    if summary.limit is None:
        console.print("packed plain text is divided over rows: nothing is cut", highlight=False)
        return
    names = ["maximum length", "rows cut", "tokens cut", *(["trained tokens cut"] if trained else [])]
    table = Table(*names)
    for column in table.columns:
        column.justify = "right"
    rows = sum(summary.histogram.values())
    for cut in summary.cuts:
        shares = [(cut.rows, rows), (cut.tokens, summary.tokens)]
        shares += [(cut.trained_tokens, summary.trained_tokens)] if trained else []
        cells = [f"{part:,} ({part / max(whole, 1):.1%})" for part, whole in shares]
        now = cut.limit == summary.limit
        table.add_row(f"{cut.limit:,}{' (now)' if now else ''}", *cells, style="bold" if now else "")
    console.print(table)
