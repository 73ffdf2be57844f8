"""`spotune run` with the fake driver, in its own process that tests can kill.

Usage: python -m tests.trainer.support.supervised DIRECTORY [RECORD.json of a head that runs already]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spotune.errors import SpotuneError
from spotune.job import RetrySpec
from spotune.units.durations import Duration
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.lock import locked
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.ray_head.head import RayHead
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient
from spotune_trainer.supervisor.ray_head.local import LocalRay, RunningRay
from spotune_trainer.supervisor.supervisor import Supervisor

TIMING = Timing(poll=0.1, hang_margin=1.0, notice=20.0, stop=10.0, unavailable=60.0)
SLOTS = 3


class SharedRay:
    """A head that another process has started and shuts down."""

    def __init__(self, running: RunningRay) -> None:
        self._running = running

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        return True

    def start(self) -> None:
        raise AssertionError("this head runs already")

    def is_alive(self) -> bool:
        return self._running.is_alive()

    def is_responding(self) -> bool:
        return self._running.is_responding()

    def client(self) -> JobsClient:
        return self._running.client()

    def record(self) -> dict[str, Any] | None:
        return self._running.to_json()

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        pass


def driver_command(directory: JobDirectory, attempt: int) -> list[str]:
    """The fake driver's command line."""
    script = Path(__file__).with_name("fake_driver.py")
    return [sys.executable, str(script), "--directory", str(directory.root), "--attempt", str(attempt)]


def main(root: Path, record: Path | None) -> int:
    directory = JobDirectory(root)

    def policy() -> RetrySpec:  # may change while it runs
        behaviour = json.loads((root / "behaviour.json").read_text())
        return RetrySpec(hang_timeout=Duration(behaviour.get("hang_timeout", "60s")))

    head: RayHead = LocalRay(root, SLOTS, gpus=False)
    if record is not None:
        head = SharedRay(RunningRay.from_json(json.loads(record.read_text())))
    view = PlainView(lambda line: print(line, flush=True))  # noqa: T201 - the output that a person would see
    try:
        with locked(directory):
            command = lambda attempt: driver_command(directory, attempt)  # noqa: E731
            supervisor = Supervisor(directory, policy, head, view, command=command, timing=TIMING)
            with ProgressServer(directory, supervisor.health_problem) as server:
                supervisor.run(server.url)
    except SpotuneError as error:
        print(error, flush=True)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
