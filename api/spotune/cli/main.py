"""The command line ``spotune``: its own small commands, those of the other packages, and how errors are shown.

Every error of ``spotune.errors`` that leaves a command becomes a few red words on standard error, or one JSON object
with ``--output json``, and its exit code. This happens here and nowhere else.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.text import Text

from spotune.cli.plugins import CommandSource, find_commands
from spotune.errors import SpotuneError, UsageError
from spotune.fingerprint import fingerprint
from spotune.job_file.load import load_job

_HELP = """Finetune language models on spot GPUs, exactly, without losing a step.

[bold]Examples[/bold]

[cyan]spotune validate job.yaml[/cyan]
check a job file

[cyan]spotune plan job.yaml[/cyan]
memory, ZeRO stage and micro-batch size by number of workers

[cyan]spotune run job.yaml --directory runs/my-job[/cyan]
train; the same command again goes on where it was

[cyan]spotune predict runs/my-job "How many singers are there?"[/cyan]
ask the trained model

[bold]Exit codes[/bold]

0 done; 2 wrong usage; 10 infrastructure failed, run it again; 20 the job's model, data or configuration is wrong;
30 a later generation of the job has taken over
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code.

    Args:
        arguments: Words after ``spotune``; None takes those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = _run(words)
    except SpotuneError as error:
        _show(error, as_json=_wants_json(words))
        code = error.exit_code
    raise SystemExit(code)


def command_line() -> typer.core.TyperGroup:
    """All commands, those of the other packages included, for programs that read what there is."""
    found = typer.main.get_command(_build_app(_sources_for("--help")))
    assert isinstance(found, typer.core.TyperGroup), "there are several"
    return found


def _run(words: list[str]) -> int:
    """Runs one command; returns its exit code. A command returns nothing, or its exit code."""
    asked = next((word for word in words if not word.startswith("-")), "")
    sources = _sources_for(asked)
    try:
        result = _build_app(sources)(args=words, prog_name="spotune", standalone_mode=False)
    except typer.TyperException as error:
        command = f"spotune {asked}" if len(sources) <= 1 else "spotune"
        what = error.format_message().rstrip(".") or "No command is given"
        raise UsageError(f"{what} (see '{command} --help')") from error
    except ModuleNotFoundError as error:
        if not sources:
            raise
        raise sources[0].missing_package(error) from error
    return result if isinstance(result, int) else 0


def _wants_json(words: Sequence[str]) -> bool:
    return "--output=json" in words or any(pair == ("--output", "json") for pair in itertools.pairwise(words))


def _show(error: SpotuneError, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(json.dumps(error.as_json()) + "\n")
    else:
        Console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)


def _sources_for(asked: str) -> list[CommandSource]:
    """Of the commands that live elsewhere the one that is asked for; all of them for ``--help`` and unknown names."""
    if asked == "validate":
        return []
    sources = find_commands()
    return [sources[asked]] if asked in sources else list(sources.values())


def _build_app(sources: list[CommandSource]) -> typer.Typer:
    """The typer app with our own commands and those of ``sources``, which are imported."""
    app = typer.Typer(name="spotune", help=_HELP, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback()(_options)
    app.command("validate")(validate)
    for source in sources:
        _register(app, source)
    return app


def _register(app: typer.Typer, source: CommandSource) -> None:
    try:
        command = source.load()
    except UsageError as error:
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(source.name, help=f"Not installed. {error}", context_settings=settings)(_refuse(error))
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=source.name)
    else:
        app.command(source.name)(command)


def _refuse(error: UsageError) -> Callable[[], None]:
    """A command in place of one that could not be loaded."""

    def refuse() -> None:
        raise error

    return refuse


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spotune {version('spotune')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``spotune`` itself."""


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="JOB.yaml...", help="Job files to check.")],
    output: Annotated[Literal["text", "json"], typer.Option(help="How the result is printed.")] = "text",
) -> None:
    """Check job files: fields, values, and what goes together.

    Example: spotune validate job.yaml
    """
    for file in files:
        job = load_job(file)
        if output == "json":
            found = {"file": str(file), "valid": True, "name": job.metadata.name, "fingerprint": fingerprint(job)}
            typer.echo(json.dumps(found))
        else:
            typer.echo(f"{file}: valid ({job.metadata.name}, fingerprint {fingerprint(job)[:8]})")
