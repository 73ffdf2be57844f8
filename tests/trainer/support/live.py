"""A real `spotune run` in its own process, whose parts a test can kill one by one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.checkpoint.memory.segment import MEMORY_FILE
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.local import RunningRay
from spotune_trainer.supervisor.ray_head.processes import Process, command_line, find_process
from spotune_trainer.worker_group.agent_daemon import PROCESS_NAME

_PATIENCE_SECONDS = 240.0
_SPOTUNE = "from spotune.cli.main import main; main()"
_OWN_PROCESS = re.compile(r"rank (?P<rank>\d+) of \d+ on .*, process (?P<pid>\d+): starts from ")


@dataclass
class LiveRun:
    """`spotune run` on one directory; a test can start and kill it repeatedly.

    Attributes:
        environment: variables added to the environment of the command.
        patience_seconds: timeout of each wait.
    """

    directory: JobDirectory
    job: FinetuneJob
    environment: Mapping[str, str] = field(default_factory=dict)
    patience_seconds: float = _PATIENCE_SECONDS
    _process: subprocess.Popen[str] | None = field(default=None)

    def start(self, *options: str) -> None:
        """Start the command, which must not be running."""
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
        """Wait for the end of the command; returns its exit code and output."""
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
        """The last step that the newest generation has logged."""
        logs = self.directory.generation_logs(latest_generation(self.directory))
        return max((line["step"] for line in files.read_lines(logs.steps)), default=0)

    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self._process is not None and self._process.poll() is not None

    def wait_for_step(self, step: int) -> None:
        """Wait until the newest generation has logged `step`."""
        self.wait_until(lambda: self.last_step() >= step, f"step {step}")

    def seconds_to_new_step(self, fault: Callable[[], None]) -> float:
        """Call `fault`; returns the seconds until a step beyond all earlier ones, after the loss was noticed.

        The loss of a worker ends its generation. That of a driver or of Ray's head does not: the next one adopts it.
        """
        generation, adoptions = latest_generation(self.directory), len(self.events("adopted"))
        began = time.monotonic()
        fault()
        self.wait_until(
            lambda: latest_generation(self.directory) > generation or len(self.events("adopted")) > adoptions,
            "the next generation, or a driver that adopts this one",
        )
        old = files.read_lines(self.directory.generation_logs(generation).steps)
        self.wait_for_step(max(line["step"] for line in old) + 1)
        return time.monotonic() - began

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition; it is an error if the command ends before."""
        until = time.monotonic() + self.patience_seconds
        while not done():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"ended with {self._process.returncode} before {what}: {self.wait()[1]}")
            if time.monotonic() > until:
                raise AssertionError(f"timed out waiting for {what}; last events: {self.events()[-3:]}")
            time.sleep(0.01)

    def workers(self) -> list[Process]:
        """The processes of the newest group, in the order of their ranks."""
        ranks = {process_name(process): process for process in self._ray().family.members()}
        return [ranks[name] for name in sorted(ranks) if name.startswith("spotune-rank-")]

    def agents(self) -> list[Process]:
        """The processes of the node agents."""
        return [process for process in self._ray().family.members() if process_name(process) == PROCESS_NAME]

    def driver(self) -> Process:
        """The process of the running driver."""
        jobs = self._jobs()
        assert jobs, "no driver runs"
        early = self._members(lambda command: "spotune_trainer.driver.__main__ import start_early" in command)
        return (early or jobs)[-1]

    def has_driver(self) -> bool:
        """Whether a driver runs. Workers train on without one after the loss of the head."""
        return bool(self._jobs())

    def _jobs(self) -> list[Process]:
        return self._members(lambda command: "-m spotune_trainer.driver" in command)

    def ranks(self) -> dict[int, Process]:
        """The running processes of the newest generation by rank, from the pids in their logs."""
        logs = self.directory.generation_logs(latest_generation(self.directory))
        found = {}
        for path in logs.root.glob("worker-*.log"):
            logged = _OWN_PROCESS.search(path.read_text())
            process = find_process(int(logged["pid"])) if logged else None
            if logged and process is not None:
                found[int(logged["rank"])] = process
        return found

    def kill_supervisor(self) -> None:
        """Kill the process of the command."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def kill_ray(self) -> None:
        """Kill the processes of its Ray head; drivers and workers are not killed."""
        for part in self._ray().parts.values():
            kill(part)

    def ray(self) -> RunningRay | None:
        """Its Ray head; None while there is none."""
        record = (files.read_json(self.directory.supervisor) or {}).get("ray")
        return RunningRay.from_json(record) if record else None

    def terminate(self) -> None:
        """Send SIGTERM, as the kubelet does before it ends a pod."""
        assert self._process is not None
        self._process.terminate()

    def kill_everything(self) -> None:
        """Kill the command and all processes of its Ray head."""
        ray = self._ray()
        self.kill_supervisor()
        ray.family.kill()

    def clean_up(self) -> None:
        """Kill everything that still runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill_supervisor()
        if self.directory.supervisor.exists():
            self._ray().shut_down()

    def _ray(self) -> RunningRay:
        ray = self.ray()
        assert ray is not None, "no Ray runs"
        return ray

    def _members(self, matches: Callable[[str], bool]) -> list[Process]:
        return [process for process in self._ray().family.members() if matches(command_line(process))]


def kill(process: Process) -> None:
    """`kill -9`."""
    os.kill(process.pid, signal.SIGKILL)


def process_name(process: Process) -> str:
    """The name that a process has set for itself; empty once it has ended."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def held_segments(process: Process) -> list[Path]:
    """The segments of shared memory that a process has open, as paths in /proc."""
    found = []
    with suppress(OSError):  # it has ended
        for link in list(Path(f"/proc/{process.pid}/fd").iterdir()):
            with suppress(OSError):  # the process has closed this file meanwhile
                found += [link] if MEMORY_FILE in str(link.readlink()) else []
    return found
