"""The commands against a cluster, as typer has them. Light at import: the one that runs loads the client library."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spotune.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from spotune_operator.cli.cluster.client import Cluster

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The job.")]
_Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="Of the job; by default that of the context.")
]
_Kubeconfig = Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of $KUBECONFIG and ~/.kube/config.")]
_Context = Annotated[str, typer.Option(metavar="NAME", help="Context of the kubeconfig; by default its current one.")]
_Output = Annotated[Literal["text", "json"], typer.Option(help="How the result is printed.")]
_Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Wait no longer than this, such as 30m.")]

_INTERRUPTED = 130


def status(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One job in full; all jobs without.")] = "",
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Show how jobs stand: all of them in a table, or one in full.

    Example: spotune status t5-sql --namespace team
    """
    if name and all_namespaces:
        raise UsageError(f"--all-namespaces shows all jobs; leave {name} out, or give its --namespace")
    from spotune_operator.cli import status as status_text
    from spotune_operator.cli.cluster.jobs import get_job, list_jobs, status_of

    cluster = _cluster(namespace, kubeconfig, context)
    if name:
        job = get_job(cluster, name)
        _print(status_text.panel(job, time.time())) if output == "text" else _print_json(status_of(job))
        return
    jobs = list_jobs(cluster, everywhere=all_namespaces)
    if output == "json":
        keys = ("name", "namespace")
        _print_json({"jobs": [{**{k: job["metadata"][k] for k in keys}, "status": status_of(job)} for job in jobs]})
    elif not jobs:
        where = "the cluster" if all_namespaces else f"namespace {cluster.namespace}"
        typer.echo(f"{where} has no FinetuneJobs")
    else:
        in_terminal = sys.stdout.isatty()
        shown = status_text.table(jobs, time.time(), with_namespace=all_namespaces, with_bar=in_terminal)
        _print(shown)


def watch(
    name: _Name,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Watch a job until it has ended; exit code 0 when it is trained, 20 when it failed.

    Example: spotune watch t5-sql
    """
    from rich.console import Console

    from spotune_operator.cli.watch import JsonView, LiveView, PlainView, View, ending, watch_job

    cluster = _cluster(namespace, kubeconfig, context)
    view: View = JsonView(typer.echo) if output == "json" else PlainView(typer.echo)
    if output == "text" and sys.stdout.isatty():
        view = LiveView(Console())

    def run() -> None:
        job = watch_job(cluster, name, view)
        if output == "text":
            typer.echo(ending(job))

    return _until_interrupted(run)


def logs(
    name: _Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the job ends.")] = False,
    lines: Annotated[int | None, typer.Option(min=0, help="Only the last so many lines there are.")] = None,
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Print what drivers and workers of a job said, of all attempts and generations, from the shared volume.

    With --follow, no line comes twice and none is lost, also when the head or the connection is. Where a job has no
    head, a pod on its volume reads the logs, and is removed again.

    Example: spotune logs t5-sql --follow --lines 50
    """
    from spotune_operator.cli.logs import followed_lines, log_lines

    cluster = _cluster(namespace, kubeconfig, context)

    def run() -> None:
        for line in (followed_lines if follow else log_lines)(cluster, name, lines, _say):
            typer.echo(line)

    return _until_interrupted(run)


def events(
    name: _Name,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Show what Kubernetes said of a job, its children and its pods, in the order of time; each thing once.

    Kubernetes forgets events after an hour, unless the cluster is set up otherwise.

    Example: spotune events t5-sql
    """
    from spotune_operator.cli.cluster.jobs import get_job, pods_of
    from spotune_operator.cli.events import happenings, lines, table

    cluster = _cluster(namespace, kubeconfig, context)
    job = get_job(cluster, name)
    pods = [pod["metadata"]["name"] for pod in pods_of(cluster, name)]
    found = happenings(cluster.items(cluster.path("events")), job, pods)
    if output == "json":
        _print_json({"events": [happening.as_json() for happening in found]})
    elif not found:
        typer.echo(f"Kubernetes remembers no events of {name}")
    elif sys.stdout.isatty():
        _print(table(found))
    else:
        for line in lines(found):
            typer.echo(line)


def suspend(
    name: _Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all pods are gone.")] = False,
    timeout: _Timeout = "",
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Commit a checkpoint and give the nodes back; `spotune resume` goes on from there.

    Example: spotune suspend t5-sql --wait --timeout 10m
    """
    from spotune_operator.cli.suspend import Patience, set_suspended, wait_until_suspended

    patience = Patience(_seconds(timeout))
    cluster = _cluster(namespace, kubeconfig, context)
    changed = set_suspended(cluster, name, suspend=True)

    def run() -> None:
        if wait:
            wait_until_suspended(cluster, name, _say, patience)
        done = "is suspended" if wait else "is being suspended" if changed else "is to be suspended already"
        _tell(f"{name} {done}", {"name": name, "suspend": True, "changed": changed, "waited": wait}, output)

    return _until_interrupted(run)


def resume(
    name: _Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it makes steps.")] = False,
    timeout: _Timeout = "",
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Let a suspended job go on from its last checkpoint.

    Example: spotune resume t5-sql --wait
    """
    from spotune_operator.cli.suspend import Patience, set_suspended, wait_until_training

    patience = Patience(_seconds(timeout))
    cluster = _cluster(namespace, kubeconfig, context)
    changed = set_suspended(cluster, name, suspend=False)

    def run() -> None:
        if wait:
            wait_until_training(cluster, name, _say, patience)
        done = "goes on" if wait or changed else "is not suspended"
        _tell(f"{name} {done}", {"name": name, "suspend": False, "changed": changed, "waited": wait}, output)

    return _until_interrupted(run)


def tensorboard(
    name: _Name,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine; 0 for any free one.")] = 6006,
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Show a job's curves in the browser, until Ctrl-C: by TensorBoard in a pod on the job's volume.

    Example: spotune tensorboard t5-sql
    """
    from spotune_operator.cli.tensorboard import HOURS
    from spotune_operator.cli.tensorboard import tensorboard as running

    cluster = _cluster(namespace, kubeconfig, context)

    def run() -> None:
        with running(cluster, name, port, _say) as (url, wait):
            typer.echo(f"TensorBoard of {name}: {url} (for {HOURS} hours, or until Ctrl-C)")
            wait()

    _until_interrupted(run)


def doctor(
    pull: Annotated[str, typer.Option(metavar="IMAGE", help="Have a node fetch this image.")] = "",
    storage_class: Annotated[
        str, typer.Option(metavar="NAME", help="The class that jobs will name, if they name one.")
    ] = "",
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Examine a cluster: is it fit for FinetuneJobs, what is missing, and how to mend it; exit code 10 if it is unfit.

    Example: spotune doctor --pull spotune/trainer:0.1.0
    """
    from spotune_operator.cli.doctor.check import Verdict, line, plain
    from spotune_operator.cli.doctor.examination import examine
    from spotune_operator.errors import KubernetesError

    checks = []
    for check in examine(_cluster(namespace, kubeconfig, context), storage_class, pull, _say):
        checks.append(check)
        if output == "text":
            _print(line(check)) if sys.stdout.isatty() else typer.echo(plain(check))
    unfit = any(check.verdict is Verdict.FAILED for check in checks)
    if output == "json":
        _print_json({"fit": not unfit, "checks": [check.as_json() for check in checks]})
    return KubernetesError.exit_code if unfit else 0


def _cluster(namespace: str, kubeconfig: Path | None, context: str) -> Cluster:
    from spotune_operator.cli.cluster.kubeconfig import Target, open_cluster

    return open_cluster(Target(namespace, kubeconfig, context))


def _until_interrupted(run: Callable[[], None]) -> int:
    """Run, and return the exit code: Ctrl-C is an end like another, without a traceback."""
    try:
        run()
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _seconds(text: str) -> float | None:
    from spotune.units.durations import Duration

    try:
        return Duration(text).seconds if text else None
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error


def _say(text: str) -> None:
    """To standard error: standard output is the result's."""
    typer.echo(text, err=True)


def _tell(text: str, content: dict[str, Any], output: str) -> None:
    if output == "json":
        _print_json(content)
    else:
        typer.echo(text)


def _print(what: RenderableType) -> None:
    _console().print(what)


def _console() -> Console:
    """Of standard output; lines that go into a file or a pipe are never cut."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


_WIDE = 240


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))
