"""`spotune supervise`: the supervisor beside the head of a Ray cluster. Imports the trainer only when called."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from spotune.errors import UsageError

_TOKEN = "RAY_AUTH_TOKEN"
_COMMIT_SECONDS = "SPOTUNE_COMMIT_SECONDS"


def supervise(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to train.")],
    directory: Annotated[Path, typer.Option(help="Folder of the job's state and result, on the shared volume.")],
    ray: Annotated[str, typer.Option(help="Address of Ray's Jobs API.")] = "http://127.0.0.1:8265",
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /progress, /metrics, /healthz and /logs are served.")
    ] = "127.0.0.1:8090",
    bucket: Annotated[
        str, typer.Option(metavar="URL", help="Bucket that keeps the job; the directory is a copy. Empty: a volume.")
    ] = "",
) -> None:
    """Train a job on the Ray head beside this process, until SIGTERM: the second container of a head pod.

    Ray's token is read from the environment variable RAY_AUTH_TOKEN, the seconds that workers have after a spot notice
    from SPOTUNE_NOTICE_SECONDS, and those for a last commit after SIGTERM from SPOTUNE_COMMIT_SECONDS. The job file may
    change at any time; changes of how it is trained apply from the next group of workers on.

    Example: spotune supervise /etc/spotune/job.yaml --directory /data/team/job-0123abcd --serve 0.0.0.0:8090
    """
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.supervisor.attempt import Timing
    from spotune_trainer.supervisor.console import PlainView
    from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
    from spotune_trainer.supervisor.daemon import SupervisorDaemon
    from spotune_trainer.supervisor.http_server import ProgressServer
    from spotune_trainer.supervisor.job_watch import JobFile
    from spotune_trainer.supervisor.pod_api import PodApi
    from spotune_trainer.supervisor.pod_supervisor import PodSupervisor
    from spotune_trainer.supervisor.preflight.bucket import other_heartbeat
    from spotune_trainer.supervisor.preflight.checks import checks_of
    from spotune_trainer.supervisor.preflight.runner import Preflight
    from spotune_trainer.supervisor.ray_head.attached import AttachedRay

    host, port = _address(serve)
    run_directory = JobDirectory(directory.absolute())
    control = ControlSignals()
    status = SupervisorStatus(control)
    job_file = JobFile(job, run_directory, status, typer.echo)
    head = AttachedRay(ray, os.environ.get(_TOKEN, ""), lambda: control.stopping)
    preflight = Preflight(run_directory, status.preflight, checks=partial(checks_of, bucket=bucket))
    timing = Timing(notice=float(os.environ.get(_COMMIT_SECONDS, Timing.notice)))
    view = PlainView(typer.echo)
    supervisor = PodSupervisor(run_directory, job_file, preflight, head, view, control, status, timing, bucket=bucket)
    daemon = SupervisorDaemon(
        run_directory,
        supervisor.run,
        control,
        status,
        job_file.has_changed,
        typer.echo,
        other_heartbeat=other_heartbeat(bucket) if bucket else None,
    )
    api = PodApi(run_directory, control, status)
    with ProgressServer(
        run_directory, supervisor.health_problem, host, port, api.get_routes, api.post_routes
    ) as server:
        supervisor.url = server.url
        daemon.run_until_terminated()


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise UsageError(f"--serve {text}: give a host and a port, such as 0.0.0.0:8090")
    return host, int(port)
