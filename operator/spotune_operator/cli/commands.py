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
from spotune_operator.cli.options import Context, Kubeconfig, Namespace, Output

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from spotune_client.cluster.client import Cluster

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
_JobOrService = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the job, or of the service if there is no such job; or ms/NAME.")
]
_Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Maximum time to wait, such as 30m.")]

_INTERRUPTED = 130


def status(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="Job to show in detail, or ms/NAME for a service. Default: tables of all jobs and services.",
        ),
    ] = "",
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show those of all namespaces; not with --namespace.")
    ] = False,
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show the status of all jobs and services in tables, or of one in detail.

    A name alone means the job, or the service if there is no such job; ms/NAME always means the service.

    Example: spotune status ms/text-to-sql --namespace team
    """
    if all_namespaces and (name or namespace):
        raise UsageError(f"--all-namespaces shows the jobs of all namespaces: remove {name or '--namespace'}")
    from spotune_client.cluster.resources import parse_name

    parse_name(name)
    cluster = _cluster(namespace, kubeconfig, context)
    if name:
        _print_one(cluster, name, output)
    else:
        _print_all(cluster, output, all_namespaces=all_namespaces)


def _print_one(cluster: Cluster, name: str, output: str) -> None:
    """Print the status of a job or service."""
    from spotune.crd.definition import FINETUNE_JOBS
    from spotune_client.cluster.jobs import status_of
    from spotune_client.cluster.resources import find_object
    from spotune_operator.cli import status as job_status
    from spotune_operator.cli.service_status import hint_at_service, panel_from_cluster

    resource, found = find_object(cluster, name)
    if output == "json":
        _print_json(status_of(found))
    elif resource is FINETUNE_JOBS:
        _print(job_status.panel(found, time.time()))
        if "/" not in name and (hint := hint_at_service(cluster, name)):
            typer.echo(f"\n{hint}")
    else:
        _print(panel_from_cluster(cluster, found, time.time()))


def _print_all(cluster: Cluster, output: str, *, all_namespaces: bool) -> None:
    """Print the status of all jobs and services."""
    from spotune_client.cluster.jobs import list_jobs
    from spotune_client.cluster.services import list_visible_services
    from spotune_operator.cli.service_status import listing, tables

    jobs = list_jobs(cluster, everywhere=all_namespaces)
    services = list_visible_services(cluster, _notify, everywhere=all_namespaces)
    if output == "json":
        _print_json({"jobs": listing(jobs), "services": listing(services)})
    elif jobs or services:
        in_terminal = sys.stdout.isatty()
        _print(tables(jobs, services, time.time(), with_namespace=all_namespaces, with_bar=in_terminal))
    else:
        where = "the cluster" if all_namespaces else f"namespace {cluster.namespace}"
        typer.echo(f"There are no FinetuneJobs and no ModelServices in {where}.")


def watch(
    name: _Name,
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
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

    name, cluster = _job(name, "watch"), _cluster(namespace, kubeconfig, context)
    view: View = JsonView(typer.echo, _notify) if output == "json" else PlainView(typer.echo)
    if output == "text" and sys.stdout.isatty():
        view = LiveView(Console())

    def run() -> None:
        job = watch_job(cluster, name, view)
        if output == "text":
            typer.echo(completion_message(job))

    return _until_interrupted(run)


def logs(
    name: _JobOrService,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines: of a job until it ends.")
    ] = False,
    lines: Annotated[int | None, typer.Option(min=0, help="Print only this many of the last lines.")] = None,
    component: Annotated[
        Literal["gateway", "replicas", "head"] | None,
        typer.Option(help="Pods of a service. Default: gateway and replicas."),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="Of a service: print only lines this young, such as 5m.")
    ] = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> int:
    """Print the logs of a job or service.

    Of a job: those of its drivers and workers, of all attempts and worker groups, from the shared volume. With
    --follow, every line is printed exactly once, even if the connection breaks or the head pod is replaced. If the job
    has no head pod, a temporary pod reads the logs from its volume.

    Of a service: what its pods have printed, in order of time. The logs of a pod are gone with the pod.

    Example: spotune logs t5-sql --follow --lines 50
    """
    from spotune.crd.definition import FINETUNE_JOBS
    from spotune_client.cluster.resources import find_object, parse_name
    from spotune_client.logs.job_logs import followed_lines, log_lines
    from spotune_client.logs.service_logs import LogSelection, followed_service_lines, service_log_lines
    from spotune_operator.cli.head_template import head_template

    parse_name(name)
    seconds = _seconds(since, "--since")
    cluster = _cluster(namespace, kubeconfig, context)

    def run() -> None:
        resource, found = find_object(cluster, name)
        title = found["metadata"]["name"]
        if resource is FINETUNE_JOBS:
            if component or since:
                raise UsageError(f"--component and --since are for services: for the service write ms/{title}")
            printed = (followed_lines if follow else log_lines)(cluster, title, lines, _notify, head_template)
        else:
            selection = LogSelection(title, component or "", lines, seconds)
            printed = (followed_service_lines if follow else service_log_lines)(cluster, selection, _notify)
        is_empty = lines != 0
        for line in printed:
            typer.echo(line)
            is_empty = False
        if is_empty:
            _notify(f"There are no logs of {title} yet. Its status tells what it waits for: spotune status {name}")

    return _until_interrupted(run)


def events(
    name: _JobOrService,
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show the Kubernetes events of a job or service, its child objects and its pods, merged and in order of time.

    Kubernetes deletes events after one hour by default.

    Example: spotune events t5-sql
    """
    from spotune_client.cluster.resources import parse_name
    from spotune_operator.cli.events import events_of, plain_lines, table

    parse_name(name)
    found = events_of(_cluster(namespace, kubeconfig, context), name)
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
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> int:
    """Save a checkpoint and release the nodes. `spotune resume` continues from this checkpoint.

    Example: spotune suspend t5-sql --wait --timeout 10m
    """
    from spotune_client.waiting import Poller, set_suspended, wait_until_suspended

    poller = Poller(_timeout(timeout, wait=wait))
    name, cluster = _job(name, "suspend"), _cluster(namespace, kubeconfig, context)
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
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> int:
    """Resume a suspended job from its last checkpoint.

    Example: spotune resume t5-sql --wait
    """
    from spotune_client.waiting import Poller, set_suspended, wait_until_training

    poller = Poller(_timeout(timeout, wait=wait))
    name, cluster = _job(name, "resume"), _cluster(namespace, kubeconfig, context)
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
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Run TensorBoard in a pod on the job's volume and forward it to this machine, until Ctrl-C.

    Example: spotune tensorboard t5-sql
    """
    from spotune_operator.cli.tensorboard import HOURS
    from spotune_operator.cli.tensorboard import tensorboard as running

    name, cluster = _job(name, "tensorboard"), _cluster(namespace, kubeconfig, context)

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
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> int:
    """Check whether a cluster can run FinetuneJobs and ModelServices, and say how to fix what is missing.

    Exit code 10 if a check failed.

    Example: spotune doctor --pull registry.example.com/spotune/trainer:0.1.0
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
    from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster

    return open_cluster(ClusterOptions(namespace, kubeconfig, context))


def _job(name: str, command: str) -> str:
    """The name of a job, for a command that knows jobs alone."""
    from spotune_client.cluster.resources import job_name

    return job_name(name, command)


def _until_interrupted(run: Callable[[], None]) -> int:
    """Run a command and return its exit code. Ctrl-C ends it without a traceback."""
    try:
        run()
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _seconds(text: str, option: str = "--timeout") -> float | None:
    from spotune.units.durations import Duration

    try:
        return Duration(text).seconds if text else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _timeout(text: str, *, wait: bool) -> float | None:
    seconds = _seconds(text)
    if seconds is not None and not wait:
        raise UsageError("--timeout limits the time of --wait: add --wait, or remove --timeout")
    return seconds


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
