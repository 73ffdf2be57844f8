"""`spotune data`: look at raw rows before they become shards."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from spotune_trainer.cli import raw_data

if TYPE_CHECKING:
    from spotune_trainer.data.preparation.preview import RowPreview

data = typer.Typer(help="Look at raw rows.", no_args_is_help=True)

_TRAINED, _CONTEXT = "bold green", "dim"


@data.callback()
def _data() -> None:
    """Look at raw rows."""  # a group, although it has one command


@data.command()
def show(
    row: Annotated[int, typer.Argument(min=1, metavar="ROW", help="Number of the row, from 1.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT...", help="Files, folders or patterns; default: dataset.prepare of the job."),
    ] = None,
    job: raw_data.Job = None,
    tokenizer: raw_data.Tokenizer = None,
    task: raw_data.Task = None,
    prompt: raw_data.Prompt = None,
    completion: raw_data.Completion = None,
    text: raw_data.Text = None,
    messages: raw_data.Messages = None,
    tools: raw_data.Tools = None,
    train_on: raw_data.TrainOn = None,
    max_length: raw_data.MaxLength = None,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: the spans of the row and what becomes of its turns.")
    ] = "text",
) -> None:
    """Print a row as the model sees it: green what it is trained to write, grey what it only reads.

    spotune data show 3 --job job.yaml

    spotune data show 1 chats.jsonl --tokenizer hf://Qwen/Qwen3-0.6B --messages messages --output json

    Where colours are not shown, ⟦ and ⟧ enclose what is trained.
    """
    settings = raw_data.read_settings(
        job,
        tokenizer,
        {
            "spec.model.tokenizer": tokenizer,
            "spec.model.task": task,
            "spec.dataset.prompt": prompt,
            "spec.dataset.completion": completion,
            "spec.dataset.text": text,
            "spec.dataset.messages": messages,
            "spec.dataset.tools": tools,
            "spec.dataset.trainOn": train_on,
            "spec.dataset.maxLength": max_length,
        },
    )
    sources = raw_data.find_sources(inputs, settings)

    from spotune_trainer.data.preparation.prepare import PrepareOptions
    from spotune_trainer.data.preparation.preview import preview_row
    from spotune_trainer.models.pretrained import load_tokenizer

    preview = preview_row(sources, row, PrepareOptions.from_job(settings).text, load_tokenizer(settings))
    if output == "json":
        names = {"trained_tokens": "trainedTokens", "cut_tokens": "cutTokens"}
        found = {names.get(name, name): value for name, value in dataclasses.asdict(preview).items()}
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        _print(preview, Console())


def _print(preview: RowPreview, console: Console) -> None:
    marked = not console.color_system
    rendered = Text()
    for span in preview.spans:
        shown = f"⟦{span.text}⟧" if span.trained and marked else span.text
        rendered.append(shown, _TRAINED if span.trained else _CONTEXT)
    counts = f"{preview.tokens:,} tokens, {preview.trained_tokens:,} of them trained"
    cut = f", {preview.cut_tokens:,} more cut" if preview.cut_tokens else ""
    console.print(f"{preview.location}: {counts}{cut}", highlight=False, soft_wrap=True)
    console.print(rendered, soft_wrap=True)
    for turn, outcome in preview.turns.items():
        if outcome != "trained":
            console.print(f"message {turn}: {outcome}", style="yellow", highlight=False)
    for problem in preview.problems:
        console.print(problem, style="red", highlight=False, soft_wrap=True)
