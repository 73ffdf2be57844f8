"""`spotune supervise`: the supervisor beside the head of a Ray cluster. Light at import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spotune.errors import UsageError

_TOKEN = "RAY_AUTH_TOKEN"
_SECONDS_FOR_THE_LOCK = 30.0


def supervise(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to train.")],
    directory: Annotated[Path, typer.Option(help="Folder of the job's state and result, on the shared volume.")],
    ray: Annotated[str, typer.Option(help="Address of Ray's Jobs API.")] = "http://127.0.0.1:8265",
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /progress, /metrics and /healthz are served.")
    ] = "127.0.0.1:8090",
) -> None:
    """Train a job on the Ray beside this process, and stay until told to go: the second container of a head pod.

    Ray's token is taken from the environment variable RAY_AUTH_TOKEN.

    Example: spotune supervise /etc/spotune/job.yaml --directory /data/team/job-0123abcd --serve 0.0.0.0:8090
    """
    from spotune_trainer.directory_lock import locked_if_possible
    from spotune_trainer.given_ray import GivenRay
    from spotune_trainer.job_directory import check_directory, put_job, read_job
    from spotune_trainer.layout import JobDirectory
    from spotune_trainer.stay import Stay
    from spotune_trainer.supervise import Supervisor
    from spotune_trainer.view import PlainView

    address = _address(serve)
    place = JobDirectory(directory.absolute())
    view = PlainView(typer.echo)

    def run() -> None:
        wanted = read_job(job, {})
        check_directory(place, wanted)
        with locked_if_possible(place, _SECONDS_FOR_THE_LOCK, typer.echo):
            put_job(place, wanted)
            if not place.result.exists():
                head = GivenRay(ray, os.environ.get(_TOKEN, ""), stay.stopped)
                Supervisor(place, wanted.spec.retry, head, view, host=address[0], port=address[1]).run()

    stay = Stay(place, run, typer.echo, address)
    stay.until_stopped()


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise UsageError(f"--serve {text}: give a host and a port, such as 0.0.0.0:8090")
    return host, int(port)
