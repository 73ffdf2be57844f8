"""Entry point of the command line ``spotune``: finds and runs commands, and prints their errors.

Every error of ``spotune.errors`` that a command raises is printed in red on standard error, or as one JSON object with
``--output json``, and sets the exit code. This is the only place that does so.
"""

import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.text import Text

from spotune.cli.plugins import CommandSource, find_commands
from spotune.cli.validate import validate
from spotune.errors import InfrastructureError, SpotuneError, UsageError

_HELP = """Finetune language models on spot GPUs, exactly, without losing a step.

[bold]Examples[/bold]

[cyan]spotune init data.jsonl --model hf://google-t5/t5-small[/cyan]
write a job file for rows and a model

[cyan]spotune validate job.yaml[/cyan]
check a job file

[cyan]spotune plan job.yaml[/cyan]
memory, ZeRO stage and micro-batch size by number of workers

[cyan]spotune run job.yaml --directory runs/my-job[/cyan]
train; run the same command again to resume

[cyan]spotune predict runs/my-job "How many singers are there?"[/cyan]
query the trained model

[cyan]spotune serve runs/my-job[/cyan]
serve it with OpenAI's API and a page

[bold]Exit codes[/bold]

0 success; 2 wrong usage; 10 infrastructure failure, run it again; 20 the job's model, data or configuration is wrong;
30 a later generation of the job has taken over
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code.

    Args:
        arguments: Arguments after ``spotune``; None: those of the process.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _replace_closed_streams()
    # torchao registers its enumerations with torch, which calls that outdated: nothing that a user can change.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        code = _run(argv)
    except SpotuneError as error:
        code = _print_error(error, as_json=_wants_json(argv))
    except OSError as error:
        if _output_is_writable():
            raise
        _discard("stdout")
        message = f"standard output cannot be written: {error.strerror}. Make room there, or redirect it elsewhere"
        code = _print_error(InfrastructureError(message), as_json=_wants_json(argv))
    raise SystemExit(code)


def command_line() -> typer.core.TyperGroup:
    """All commands, including those of the other packages, for generators of documentation."""
    found = typer.main.get_command(_build_app(_sources_for("--help")))
    assert isinstance(found, typer.core.TyperGroup), "spotune has several commands"
    return found


def _run(argv: list[str]) -> int:
    """Run one command and return its exit code. A command returns None or its exit code."""
    requested = next((word for word in argv if not word.startswith("-")), "")
    sources = _sources_for(requested)
    try:
        result = _build_app(sources)(args=argv, prog_name="spotune", standalone_mode=False)
    except typer.TyperException as error:
        command = f"spotune {requested}" if len(sources) <= 1 else "spotune"
        what = error.format_message().rstrip(".") or "Missing command"
        raise UsageError(f"{what} (see '{command} --help')") from error
    except ModuleNotFoundError as error:
        if not sources:
            raise
        raise sources[0].missing_package(error) from error
    return result if isinstance(result, int) else 0


def _replace_closed_streams() -> None:
    """Write to nowhere if the caller has closed standard output or error, as with ``>&-``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _discard(name)


def _discard(stream: str) -> None:
    """Write to nowhere in place of a stream. Python flushes ``sys.stdout`` when it ends, and would fail once more."""
    setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _output_is_writable() -> bool:
    """Whether standard output takes the rest of what was printed, and an empty line."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _wants_json(argv: Sequence[str]) -> bool:
    return "--output=json" in argv or any(pair == ("--output", "json") for pair in itertools.pairwise(argv))


def _print_error(error: SpotuneError, as_json: bool) -> int:
    """Print an error on standard error, and return its exit code."""
    try:
        if as_json:
            sys.stderr.write(json.dumps(error.as_json()) + "\n")
        else:
            Console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
    except OSError:  # nothing can be said; the exit code says it
        _discard("stderr")
    return error.exit_code


def _sources_for(requested: str) -> list[CommandSource]:
    """The source of the requested command; all sources for ``--help`` and for unknown commands."""
    if requested == "validate":
        return []
    sources = find_commands()
    return [sources[requested]] if requested in sources else list(sources.values())


def _build_app(sources: list[CommandSource]) -> typer.Typer:
    """The typer app with ``validate`` and the commands of ``sources``, which are imported."""
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
        app.command(source.name, help=f"Not installed. {error}", context_settings=settings)(_raising_command(error))
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=source.name)
    else:
        app.command(source.name)(command)


def _raising_command(error: UsageError) -> Callable[[], None]:
    """A command that raises the error of the one that could not be loaded."""

    def raise_error() -> None:
        raise error

    return raise_error


def _print_version(enabled: bool) -> None:
    if enabled:
        typer.echo(f"spotune {version('spotune')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``spotune`` itself."""
