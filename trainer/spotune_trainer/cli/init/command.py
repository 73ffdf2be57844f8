"""`spotune init`: writes a commented job file for rows and a model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from spotune.errors import JobError, UsageError
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_trainer.cli import raw_data
from spotune_trainer.cli.init import decisions, hyperparameters, questions
from spotune_trainer.cli.init.fit import Training, find_fit
from spotune_trainer.cli.init.formats.choose import choose_row_format
from spotune_trainer.cli.init.formats.given import given_format
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat
from spotune_trainer.cli.init.job_file import content_of, render_job_file
from spotune_trainer.cli.init.machine import find_machine
from spotune_trainer.cli.init.model import check_format, check_head, read_model
from spotune_trainer.cli.init.profiles import Choice, DataProfile, MachineProfile, ModelProfile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spotune_trainer.data.preparation.inputs import RawInput

_STANDARD_OUTPUT = "-"
_DEFAULT_FILE = "job.yaml"
_HEAD = """Written by `spotune init` for {data} and {model}.
Comments say what was observed, and what can be changed; docs/reference/finetunejob.md has every field.

{commands}"""


def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="File, folder or pattern of the rows, or a dataset.")],
    model: Annotated[str, typer.Option(metavar="SOURCE", help="A folder, or hf://owner/name.")],
    output_file: Annotated[
        str | None, typer.Option(metavar="FILE", help=f"Job file to write; -: print it. Default: {_DEFAULT_FILE}.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job file if it exists.")] = False,
    name: Annotated[str, typer.Option(help="Name of the job. Default: of the model and the file of the rows.")] = "",
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs to train on; 0: the CPU. Default: those of this machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="GPU, such as a100-80gb, h200 or l4. Default: this machine's.")] = "",
    device_memory: Annotated[str, typer.Option(help="Memory of one GPU or CPU worker, such as 80GB.")] = "",
    config: raw_data.Config = None,
    split: raw_data.Split = None,
    tokenizer: raw_data.Tokenizer = None,
    prompt: raw_data.Prompt = None,
    completion: raw_data.Completion = None,
    chosen: raw_data.Chosen = None,
    rejected: raw_data.Rejected = None,
    text: raw_data.Text = None,
    messages: raw_data.Messages = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Label of --text, or of each word; or whether the answer is desirable."),
    ] = None,
    query: raw_data.Query = None,
    positive: raw_data.Positive = None,
    negative: raw_data.Negative = None,
    max_skipped: Annotated[int, typer.Option(min=0, help="Rows, and answers of chats, that may be left out.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the rows. Default: by their number.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Tokenize only so many rows, from the start.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Ask for format, epochs and file.")] = False,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: what was observed and decided, as one JSON object.")
    ] = "text",
) -> None:
    """Write a commented job file for rows and a model: format, lengths, memory and hyperparameters.

    spotune init data/questions.jsonl --model hf://google-t5/t5-small

    spotune init "chats/*.parquet" --model models/qwen --gpus 4 --device h100-80gb --output-file chats.yaml

    spotune init rows.csv --model models/llama --prompt "{en}" --completion "{fr}" --interactive

    spotune init pairs.jsonl --model models/llama --prompt "{q}" --chosen "{good}" --rejected "{bad}"

    spotune init hf://datasets/openai/gsm8k --config main --split train --model hf://HuggingFaceTB/SmolLM2-135M

    spotune init reviews.csv --model hf://google-bert/bert-base-uncased --text "{review}" --label stars

    The file runs as it is: spotune validate, plan and run take it.
    """
    from spotune_trainer.cli.init.columns import profile_columns
    from spotune_trainer.data.preparation.inputs import find_inputs

    target = output_file or _DEFAULT_FILE
    _check_target(target, force=force or (interactive and output_file is None), as_json=output == "json")
    raw_rows = raw_data.of_split(data, config, split)
    machine = find_machine(gpus, device, device_memory)
    if "://" not in data:
        find_inputs([raw_rows])  # names a file that is missing before a model is downloaded
    profile, loaded = read_model(model, tokenizer or "")
    with Console(stderr=True).status("reading rows") as status:
        count, columns = profile_columns(raw_rows, lambda read: status.update(f"{read:,} rows read"))
    options = {
        "prompt": prompt, "completion": completion, "text": text, "messages": messages, "chosen": chosen,
        "rejected": rejected, "label": label, "query": query, "positive": positive, "negative": negative,
    }  # fmt: skip
    row_format = given_format(columns, {name: value or "" for name, value in options.items()})
    if row_format is None:
        row_format = _find_format(columns, profile, interactive=interactive)
    check_format(row_format, profile)
    measured = _measure(raw_rows, count, columns, row_format, profile, loaded, rows=rows, max_skipped=max_skipped)
    if interactive:
        kept = decisions.samples_of(measured, profile) - decisions.held_out_rows(measured, profile)
        objective = hyperparameters.objective_of(measured, profile)
        epochs = questions.ask_epochs(epochs or hyperparameters.decide_epochs(kept, objective))
        target = output_file or questions.ask_output_file(_DEFAULT_FILE, force=force)
    folder = Path.cwd() if target == _STANDARD_OUTPUT else Path(target).absolute().parent
    measured = dataclasses.replace(measured, source=_relative(data, folder), config=config or "", split=split or "")
    profile = dataclasses.replace(
        profile, source=_relative(model, folder), tokenizer=_relative(tokenizer, folder) if tokenizer else ""
    )
    job_name = name or decisions.name_of(data, model)
    choices = _choices(job_name, measured, profile, machine, max_skipped=max_skipped, epochs=epochs)
    job = parse_job(Document(content_of(choices), file="the options"))
    check_head(job, model)
    commands = _commands(target, job.metadata.name, profile, machine)
    comment = "".join(f"  {line}\n" for line in commands)
    written = render_job_file(choices, _HEAD.format(data=measured.source, model=profile.source, commands=comment))
    if target == _STANDARD_OUTPUT:
        typer.echo(written, nl=False)
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(written, encoding="utf-8")
    if output == "json":
        typer.echo(json.dumps(_json(target, choices, measured, profile, machine), ensure_ascii=False))
    else:
        _print(target, job.spec.adapter is not None, measured, profile, commands)


def _check_target(target: str, *, force: bool, as_json: bool) -> None:
    """Raise UsageError if the job file cannot be written; before rows are read, which may take long."""
    if target == _STANDARD_OUTPUT:
        if as_json:
            raise UsageError("--output json needs a file for the job: standard output holds one of them only")
        return
    if Path(target).is_dir():
        raise UsageError(f"--output-file {target}: is a folder; give the name of a file in it")
    if Path(target).exists() and not force:
        raise UsageError(f"{target} exists: give another --output-file, or replace it with --force")


def _find_format(columns: Sequence[ColumnProfile], model: ModelProfile, *, interactive: bool) -> RowFormat:
    """The row format that the columns suggest, or that the user chooses."""
    try:
        detected = choose_row_format(
            columns,
            model.task,
            has_chat_template=model.has_chat_template,
            is_encoder=model.is_encoder,
            classifies_texts=model.classifies_texts,
            separator=model.separator,
        )
    except JobError as error:
        if not interactive:
            raise
        return questions.ask_row_format(columns, None, str(error))
    return questions.ask_row_format(columns, detected, "") if interactive else detected


def _measure(
    raw_rows: RawInput,
    count: int,
    columns: tuple[ColumnProfile, ...],
    row_format: RowFormat,
    model: ModelProfile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int | None,
    max_skipped: int,
) -> DataProfile:
    """Tokenize the rows.

    Raises:
        JobError: A row cannot be rendered, or more is left out than `max_skipped`.
    """
    from spotune_trainer.data.counts.left_out import check_left_out
    from spotune_trainer.data.preparation.lengths import collect_lengths
    from spotune_trainer.data.rows.options import TextOptions

    try:
        options = TextOptions(
            model.task, row_format.prompt, row_format.completion, row_format.text, row_format.messages,
            tools=row_format.tools, chosen=row_format.chosen, rejected=row_format.rejected, label=row_format.label,
            labels=row_format.labels, label_each_word=row_format.label_each_word, query=row_format.query,
            positive=row_format.positive, negative=row_format.negative,
        )  # fmt: skip
    except ValueError as error:
        raise JobError(str(error)) from error
    with Console(stderr=True).status("tokenizing rows") as status:
        found = collect_lengths(
            [raw_rows], options, tokenizer, max_rows=rows, report=lambda read: status.update(f"{read:,} rows tokenized")
        )
    check_left_out(found.problems, found.left_out, max_skipped)
    target = found.target.rows_by_length if found.target is not None else None
    has_prompt = target is None and not (row_format.text or row_format.query)
    return DataProfile(
        source=str(raw_rows),
        rows=count,
        columns=columns,
        format=row_format,
        measured_rows=found.rows,
        duplicates=found.duplicates,
        lengths=found.input.rows_by_length,
        target_lengths=target,
        prompt_lengths=found.input.rows_by_untrained_start if has_prompt else {},
    )


def _choices(
    name: str,
    data: DataProfile,
    model: ModelProfile,
    machine: MachineProfile,
    *,
    max_skipped: int,
    epochs: int | None,
) -> list[Choice]:
    """All fields of the job."""

    def without_execution(training: Training) -> list[Choice]:
        return [
            Choice("metadata.name", name),
            *decisions.decide_model(model, machine),
            *decisions.decide_adapter(model, training),
            *decisions.decide_dataset(data, model, max_skipped),
            *hyperparameters.decide_training(data, model, machine, training, epochs),
        ]

    fit = find_fit(model, machine, without_execution, adapters=not data.format.query)
    return [
        *without_execution(fit.training),
        *fit.execution,
        *decisions.decide_workers(machine, fit.minimum),
    ]


def _relative(source: str, folder: Path) -> str:
    """A source as the job file names it: relative to its folder, unless it is absolute or a URL."""
    if "://" in source or Path(source).is_absolute():
        return source
    return os.path.relpath(source, folder)


def _commands(target: str, name: str, profile: ModelProfile, machine: MachineProfile) -> list[str]:
    """The commands to go on with."""
    file = _DEFAULT_FILE if target == _STANDARD_OUTPUT else target
    commands = [f"spotune validate {file}", f"spotune data show 1 --job {file}"]
    if profile.architecture is not None:
        commands.append(f"spotune plan {file}{machine.plan_options}")
    return [*commands, f"spotune run {file} --directory runs/{name}"]


def _json(
    target: str, choices: Sequence[Choice], data: DataProfile, model: ModelProfile, machine: MachineProfile
) -> dict[str, Any]:
    """What was observed and decided, with the job as it is in the file."""
    columns = [
        {
            "name": column.name,
            "kinds": dict(column.kinds),
            "missing": data.rows - column.rows,
            "empty": column.empty,
            "script": column.script,
        }
        for column in data.columns
    ]
    return {
        "file": target,
        "data": {
            "rows": data.rows,
            "measuredRows": data.measured_rows,
            "duplicates": data.duplicates,
            "format": data.format.description,
            "columns": columns,
        },
        "model": {
            "task": model.task,
            "modelType": model.model_type,
            "parameters": model.parameters,
            "maxPositions": model.max_positions,
            "hasWeights": model.has_weights,
            "hasChatTemplate": model.has_chat_template,
        },
        "machine": {"gpus": machine.gpus, "memoryBytes": machine.memory_bytes, "description": machine.description},
        "reasons": {choice.path: choice.reason for choice in choices if choice.reason},
        "job": content_of(choices),
    }


def _print(target: str, adapter: bool, data: DataProfile, model: ModelProfile, commands: Sequence[str]) -> None:
    console = Console()
    trained = "adapters of it" if adapter else "all weights"
    console.print(
        f"{target} is written: {data.rows:,} rows ({data.format.description}), {model.model_type} with "
        f"{model.parameters:,} parameters, trains {trained}. Next:",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    for command in commands:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)
