"""`spotune supervise`: the supervisor beside the head of a Ray cluster. Light at import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spotune.errors import UsageError

_TOKEN = "RAY_AUTH_TOKEN"


def supervise(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to train.")],
    directory: Annotated[Path, typer.Option(help="Folder of the job's state and result, on the shared volume.")],
    ray: Annotated[str, typer.Option(help="Address of Ray's Jobs API.")] = "http://127.0.0.1:8265",
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /progress, /metrics, /healthz and /logs are served.")
    ] = "127.0.0.1:8090",
) -> None:
    """Train a job on the Ray beside this process, and stay until told to go: the second container of a head pod.

    Ray's token is taken from the environment variable RAY_AUTH_TOKEN, the seconds that workers have after a spot notice
    from SPOTUNE_NOTICE_SECONDS. The job file may change at any time: how it trains is then followed from the next group
    of workers on.

    Example: spotune supervise /etc/spotune/job.yaml --directory /data/team/job-0123abcd --serve 0.0.0.0:8090
    """
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.supervisor.console import PlainView
    from spotune_trainer.supervisor.control import Orders, Standing
    from spotune_trainer.supervisor.daemon import Stay
    from spotune_trainer.supervisor.http_server import ProgressServer
    from spotune_trainer.supervisor.job_watch import JobFile
    from spotune_trainer.supervisor.pod_api import PodPages
    from spotune_trainer.supervisor.pod_supervisor import PodSupervisor
    from spotune_trainer.supervisor.preflight.checks import Preflight
    from spotune_trainer.supervisor.ray_head.attached import GivenRay

    host, port = _address(serve)
    place = JobDirectory(directory.absolute())
    orders = Orders()
    standing = Standing(orders)
    job_file = JobFile(job, place, standing, typer.echo)
    head = GivenRay(ray, os.environ.get(_TOKEN, ""), lambda: orders.stopping)
    preflight = Preflight(place, standing)
    supervisor = PodSupervisor(place, job_file, preflight, head, PlainView(typer.echo), orders, standing)
    stay = Stay(place, supervisor.run, orders, standing, job_file.has_changed, typer.echo)
    pages = PodPages(place, orders, standing)
    with ProgressServer(place, supervisor.sickness, host, port, pages.pages, pages.actions) as server:
        supervisor.url = server.url
        stay.until_told_to_leave()


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise UsageError(f"--serve {text}: give a host and a port, such as 0.0.0.0:8090")
    return host, int(port)
