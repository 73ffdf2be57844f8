"""The typer commands that talk to a cluster. They import the Kubernetes client only when they run."""

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

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
_Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the job. Default: the context's.")
]
_Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Kubeconfig. Default: $KUBECONFIG or ~/.kube/config.")
]
_Context = Annotated[str, typer.Option(metavar="NAME", help="Context of the kubeconfig. Default: the current one.")]
_Output = Annotated[Literal["text", "json"], typer.Option(help="Output format.")]
_Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Maximum time to wait, such as 30m.")]

_INTERRUPTED = 130


def status(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Job to show in detail. Default: a table of all jobs.")
    ] = "",
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
    ] = False,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Show the status of all jobs in a table, or of one job in detail.

    Example: spotune status t5-sql --namespace team
    """
    if name and all_namespaces:
        raise UsageError(f"--all-namespaces shows all jobs: remove {name}, or use --namespace instead")
    from spotune_operator.cli import status as status_view
    from spotune_operator.cli.cluster.jobs import get_job, list_jobs, status_of

    cluster = _cluster(namespace, kubeconfig, context)
    if name:
        job = get_job(cluster, name)
        _print(status_view.panel(job, time.time())) if output == "text" else _print_json(status_of(job))
        return
    jobs = list_jobs(cluster, everywhere=all_namespaces)
    if output == "json":
        keys = ("name", "namespace")
        _print_json({"jobs": [{**{k: job["metadata"][k] for k in keys}, "status": status_of(job)} for job in jobs]})
    elif not jobs:
        where = "the cluster" if all_namespaces else f"namespace {cluster.namespace}"
        typer.echo(f"There are no FinetuneJobs in {where}.")
    else:
        in_terminal = sys.stdout.isatty()
        _print(status_view.table(jobs, time.time(), with_namespace=all_namespaces, with_bar=in_terminal))


def watch(
    name: _Name,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Watch a job until it ends. The exit code is 0 if it completed and 20 if it failed.

    Example: spotune watch t5-sql
    """
    from rich.console import Console

    from spotune_operator.cli.watch import (
        JsonView,
        LiveView,
        PlainView,
        View,
        completion_message,
        watch_job,
    )

    cluster = _cluster(namespace, kubeconfig, context)
    view: View = JsonView(typer.echo) if output == "json" else PlainView(typer.echo)
    if output == "text" and sys.stdout.isatty():
        view = LiveView(Console())

    def run() -> None:
        job = watch_job(cluster, name, view)
        if output == "text":
            typer.echo(completion_message(job))

    return _until_interrupted(run)


def logs(
    name: _Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")] = False,
    lines: Annotated[int | None, typer.Option(min=0, help="Print only this many of the last lines.")] = None,
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Print the logs of a job's drivers and workers, of all attempts and worker groups, from the shared volume.

    With --follow, every line is printed exactly once, even if the connection breaks or the head pod is replaced. If the
    job has no head pod, a temporary pod reads the logs from its volume.

    Example: spotune logs t5-sql --follow --lines 50
    """
    from spotune_operator.cli.logs import followed_lines, log_lines

    cluster = _cluster(namespace, kubeconfig, context)

    def run() -> None:
        for line in (followed_lines if follow else log_lines)(cluster, name, lines, _notify):
            typer.echo(line)

    return _until_interrupted(run)


def events(
    name: _Name,
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Show the Kubernetes events of a job, its child objects and its pods, in order of time and without repetitions.

    Kubernetes deletes events after one hour by default.

    Example: spotune events t5-sql
    """
    from spotune_operator.cli.cluster.jobs import get_job, pods_of
    from spotune_operator.cli.events import plain_lines, summarize_events, table

    cluster = _cluster(namespace, kubeconfig, context)
    job = get_job(cluster, name)
    pods = [pod["metadata"]["name"] for pod in pods_of(cluster, name)]
    found = summarize_events(cluster.items(cluster.path("events")), job, pods)
    if output == "json":
        _print_json({"events": [happening.as_json() for happening in found]})
    elif not found:
        typer.echo(f"There are no events for {name}. Kubernetes deletes them after one hour by default.")
    elif sys.stdout.isatty():
        _print(table(found))
    else:
        for line in plain_lines(found):
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
    """Save a checkpoint and release the nodes. `spotune resume` continues from this checkpoint.

    Example: spotune suspend t5-sql --wait --timeout 10m
    """
    from spotune_operator.cli.suspend import Poller, set_suspended, wait_until_suspended

    poller = Poller(_seconds(timeout))
    cluster = _cluster(namespace, kubeconfig, context)
    changed = set_suspended(cluster, name, suspend=True)

    def run() -> None:
        if wait:
            wait_until_suspended(cluster, name, _notify, poller)
        done = "is suspended" if wait else "is being suspended" if changed else "is already suspended or suspending"
        _print_result(f"{name} {done}", {"name": name, "suspend": True, "changed": changed, "waited": wait}, output)

    return _until_interrupted(run)


def resume(
    name: _Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it trains.")] = False,
    timeout: _Timeout = "",
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Resume a suspended job from its last checkpoint.

    Example: spotune resume t5-sql --wait
    """
    from spotune_operator.cli.suspend import Poller, set_suspended, wait_until_training

    poller = Poller(_seconds(timeout))
    cluster = _cluster(namespace, kubeconfig, context)
    changed = set_suspended(cluster, name, suspend=False)

    def run() -> None:
        if wait:
            wait_until_training(cluster, name, _notify, poller)
        done = "is training" if wait else "is resuming" if changed else "is not suspended"
        _print_result(f"{name} {done}", {"name": name, "suspend": False, "changed": changed, "waited": wait}, output)

    return _until_interrupted(run)


def tensorboard(
    name: _Name,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port. 0: any free port.")] = 6006,
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Run TensorBoard in a pod on the job's volume and forward it to this machine, until Ctrl-C.

    Example: spotune tensorboard t5-sql
    """
    from spotune_operator.cli.tensorboard import HOURS
    from spotune_operator.cli.tensorboard import tensorboard as running

    cluster = _cluster(namespace, kubeconfig, context)

    def run() -> None:
        with running(cluster, name, port, _notify) as (url, wait):
            typer.echo(f"TensorBoard of {name}: {url} (until Ctrl-C, {HOURS} hours at most)")
            wait()

    _until_interrupted(run)


def doctor(
    pull: Annotated[str, typer.Option(metavar="IMAGE", help="Also check that a node can pull this image.")] = "",
    storage_class: Annotated[
        str,
        typer.Option(metavar="NAME", help="StorageClass that jobs will use. Default: the provider's or the cluster's."),
    ] = "",
    output: _Output = "text",
    namespace: _Namespace = "",
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> int:
    """Check whether a cluster can run FinetuneJobs, and say how to fix what is missing. Exit code 10 if it cannot.

    Example: spotune doctor --pull spotune/trainer:0.1.0
    """
    from spotune_operator.cli.doctor.check import Verdict, plain_text, render
    from spotune_operator.cli.doctor.examination import examine
    from spotune_operator.errors import KubernetesError

    checks = []
    for check in examine(_cluster(namespace, kubeconfig, context), storage_class, pull, _notify):
        checks.append(check)
        if output == "text":
            _print(render(check)) if sys.stdout.isatty() else typer.echo(plain_text(check))
    unfit = any(check.verdict is Verdict.FAILED for check in checks)
    if output == "json":
        _print_json({"fit": not unfit, "checks": [check.as_json() for check in checks]})
    return KubernetesError.exit_code if unfit else 0


def _cluster(namespace: str, kubeconfig: Path | None, context: str) -> Cluster:
    from spotune_operator.cli.cluster.kubeconfig import ClusterOptions, open_cluster

    return open_cluster(ClusterOptions(namespace, kubeconfig, context))


def _until_interrupted(run: Callable[[], None]) -> int:
    """Run a command and return its exit code. Ctrl-C ends it without a traceback."""
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


def _notify(text: str) -> None:
    """Print a progress message on standard error; standard output is for the result."""
    typer.echo(text, err=True)


def _print_result(text: str, content: dict[str, Any], output: str) -> None:
    if output == "json":
        _print_json(content)
    else:
        typer.echo(text)


def _print(renderable: RenderableType) -> None:
    _console().print(renderable)


def _console() -> Console:
    """A console on standard output. Lines that go to a file or pipe are not truncated."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


_WIDE = 240


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))
