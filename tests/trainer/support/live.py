"""A real `spotune run` in a process of its own, whose parts a test can kill one by one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.local import RunningRay
from spotune_trainer.supervisor.ray_head.processes import Process, command_line, find_process

_PATIENCE_SECONDS = 240.0
_SPOTUNE = "from spotune.cli.main import main; main()"
_OWN_PROCESS = re.compile(r"rank (?P<rank>\d+) of \d+ on .*, process (?P<pid>\d+): from ")


@dataclass
class LiveRun:
    """`spotune run` on one directory, started and killed as often as a test likes.

    Attributes:
        environment: what the command finds in its environment besides ours.
        patience_seconds: how long anything may take.
    """

    directory: JobDirectory
    job: FinetuneJob
    environment: Mapping[str, str] = field(default_factory=dict)
    patience_seconds: float = _PATIENCE_SECONDS
    _process: subprocess.Popen[str] | None = field(default=None)

    def start(self, *options: str) -> None:
        """Run the command; it must not run already."""
        self.directory.root.mkdir(parents=True, exist_ok=True)
        job_file = self.directory.root.with_suffix(".yaml")
        job_file.write_text(self.job.model_dump_json(exclude_unset=True))
        command = [sys.executable, "-c", _SPOTUNE, "run", str(job_file), "--directory", str(self.directory.root)]
        self._process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and output of the command."""
        assert self._process is not None
        output, _ = self._process.communicate(timeout=self.patience_seconds)
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

    def has_ended(self) -> bool:
        """Whether the command has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def wait_for_step(self, step: int) -> None:
        """Wait until a worker group has gone past `step`."""
        self.wait_until(lambda: self.last_step() >= step, f"step {step}")

    def seconds_to_new_step(self, deed: Callable[[], None]) -> float:
        """Do what ends the worker group, and wait for a step that was never reached before; seconds from the deed."""
        generation = latest_generation(self.directory)
        began = time.monotonic()
        deed()
        self.wait_until(lambda: latest_generation(self.directory) > generation, "the next generation")
        old = files.read_lines(self.directory.generation_logs(generation).steps)
        self.wait_for_step(max(line["step"] for line in old) + 1)
        return time.monotonic() - began

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something; a command that ends meanwhile is an error."""
        until = time.monotonic() + self.patience_seconds
        while not done():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"ended with {self._process.returncode} before {what}: {self.wait()[1]}")
            if time.monotonic() > until:
                raise AssertionError(f"waited too long for {what}; the ledger says {self.events()[-3:]}")
            time.sleep(0.01)

    def workers(self) -> list[Process]:
        """The ranks of the newest group, in their order."""
        ranks = {process_name(process): process for process in self._ray().family.members()}
        return [ranks[name] for name in sorted(ranks) if name.startswith("spotune-rank-")]

    def driver(self) -> Process:
        """The driver that runs."""
        found = self._members(lambda command: "spotune_trainer.driver.driver" in command)
        assert found, "no driver runs"
        return found[-1]

    def ranks(self) -> dict[int, Process]:
        """The processes of the newest generation that have said so in their logs and still run, by rank."""
        logs = self.directory.generation_logs(latest_generation(self.directory))
        found = {}
        for path in logs.root.glob("worker-*.log"):
            said = _OWN_PROCESS.search(path.read_text())
            process = find_process(int(said["pid"])) if said else None
            if said and process is not None:
                found[int(said["rank"])] = process
        return found

    def kill_supervisor(self) -> None:
        """End the command itself, at once."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def kill_ray(self) -> None:
        """End the head of its Ray at once; what runs in it is left to itself."""
        for part in self._ray().parts.values():
            kill(part)

    def ray(self) -> RunningRay | None:
        """Its Ray; None while there is none."""
        record = (files.read_json(self.directory.supervisor) or {}).get("ray")
        return RunningRay.from_json(record) if record else None

    def tell_to_leave(self) -> None:
        """What the kubelet does with a pod whose node goes: SIGTERM."""
        assert self._process is not None
        self._process.terminate()

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
        ray = self.ray()
        assert ray is not None, "no Ray runs"
        return ray

    def _members(self, wanted: Callable[[str], bool]) -> list[Process]:
        return [process for process in self._ray().family.members() if wanted(command_line(process))]


def kill(process: Process) -> None:
    """`kill -9`."""
    os.kill(process.pid, signal.SIGKILL)


def process_name(process: Process) -> str:
    """The name that a process gave itself."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""
