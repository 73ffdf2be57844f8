"""A real `spotune run` in a process of its own, whose parts a test can kill one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.generations import latest_generation
from spotune_trainer.layout import JobDirectory
from spotune_trainer.ledger import Ledger
from spotune_trainer.local_ray import RunningRay
from spotune_trainer.processes import Process, command_line

_PATIENCE_SECONDS = 240.0
_SPOTUNE = "from spotune.cli import main; main()"


@dataclass
class LiveRun:
    """`spotune run` on one directory, started and killed as often as a test likes."""

    directory: JobDirectory
    job: FinetuneJob
    _process: subprocess.Popen[str] | None = field(default=None)

    def start(self, *options: str) -> None:
        """Run the command; it must not run already."""
        self.directory.root.mkdir(parents=True, exist_ok=True)
        job_file = self.directory.root.with_suffix(".yaml")
        job_file.write_text(self.job.model_dump_json(exclude_unset=True))
        command = [sys.executable, "-c", _SPOTUNE, "run", str(job_file), "--directory", str(self.directory.root)]
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and output of the command."""
        assert self._process is not None
        output, _ = self._process.communicate(timeout=_PATIENCE_SECONDS)
        return self._process.returncode, output

    def result(self) -> dict[str, Any]:
        """`result.json`."""
        value: dict[str, Any] = json.loads(self.directory.result.read_text())
        return value

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Events of the ledger."""
        return Ledger(self.directory).records(*names)

    def last_step(self) -> int:
        """The newest step that the newest generation logged."""
        logs = self.directory.generation_logs(latest_generation(self.directory))
        return max((line["step"] for line in files.read_lines(logs.steps)), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until a worker group has gone past `step`."""
        self.wait_until(lambda: self.last_step() >= step, f"step {step}")

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something; a command that ends meanwhile is an error."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while not done():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"ended with {self._process.returncode} before {what}: {self.wait()[1]}")
            if time.monotonic() > until:
                raise AssertionError(f"waited too long for {what}; the ledger says {self.events()[-3:]}")
            time.sleep(0.01)

    def workers(self) -> list[Process]:
        """The train workers of the newest group."""
        return self._members(lambda command: command.startswith("ray::") and "TrainWorker" in command)

    def driver(self) -> Process:
        """The driver that runs."""
        found = self._members(lambda command: "spotune_trainer.driver" in command)
        assert found, "no driver runs"
        return found[-1]

    def kill_supervisor(self) -> None:
        """End the command itself, at once."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def kill_everything(self) -> None:
        """End the command and all of its Ray, at once."""
        ray = self._ray()
        self.kill_supervisor()
        ray.family.end()

    def end(self) -> None:
        """Leave nothing running, whatever the test did."""
        if self._process is not None and self._process.poll() is None:
            self.kill_supervisor()
        if self.directory.supervisor.exists():
            self._ray().end()

    def _ray(self) -> RunningRay:
        return RunningRay.from_json(json.loads(self.directory.supervisor.read_text())["ray"])

    def _members(self, wanted: Callable[[str], bool]) -> list[Process]:
        return [process for process in self._ray().family.members() if wanted(command_line(process))]


def kill(process: Process) -> None:
    """`kill -9`."""
    os.kill(process.pid, signal.SIGKILL)
