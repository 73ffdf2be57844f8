"""A real `spotune serve` in its own process, whose replicas a test can kill."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PATIENCE_SECONDS = 180.0
SPOTUNE = "from spotune.cli.main import main; main()"
"""Code of the command `spotune`, of the packages that are tested."""
_REPLICA = "ray::ServeReplica:model:Replica"
_GATEWAY = "ray::ServeReplica:spotune:Gateway"


class ServeCommand:
    """`spotune serve` in its own process, from its start until it has ended.

    Args:
        model: a run or the folder of a model.
        options: of the command, beside a free port.
        environment: variables besides those of this process.
    """

    def __init__(self, model: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-c", SPOTUNE, "serve", str(model), "--port", "0", *options]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.stop()

    def processes(self) -> list[int]:
        """Process ids of everything that the service started and that runs now."""
        return _descendants(self._process.pid)

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal to the command; returns its exit code and standard error once it has ended."""
        self._process.send_signal(number)
        return self.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Exit code and standard error, once the command has ended."""
        _, errors = self._process.communicate(timeout=_PATIENCE_SECONDS)
        return self._process.returncode, errors

    def read_ready_line(self, start: str) -> str:
        """The line that starts with a text, among those that it prints at once when it is ready.

        Raises:
            AssertionError: it ended, or printed nothing in time.
        """
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_SECONDS)
        for line in self._process.stdout if readable else ():
            if line.startswith(start):
                return line
        self._process.kill()
        raise AssertionError(f"spotune serve is not ready: {self._process.communicate()[1][-3000:]}")


class LiveService(ServeCommand):
    """`spotune serve` whose replicas a test can kill.

    Attributes:
        ready: the JSON line that it printed: `url`, `openaiBaseUrl`, `model`, `pid`.
    """

    def __init__(self, model: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        super().__init__(model, "--output", "json", *options, environment=environment)
        try:
            self.ready: dict[str, Any] = json.loads(self.read_ready_line("{"))
        except BaseException:
            self._process.kill()
            raise

    @property
    def url(self) -> str:
        """Of the page."""
        return str(self.ready["url"])

    def replicas(self) -> list[int]:
        """Process ids of the replicas that run now."""
        return self._processes_named(_REPLICA)

    def gateways(self) -> list[int]:
        """Process ids of the gateways that run now."""
        return self._processes_named(_GATEWAY)

    def _processes_named(self, name: str) -> list[int]:
        return [pid for pid in self.processes() if _command(pid).startswith(name)]

    def kill_replica(self) -> int:
        """SIGKILL to one replica; returns its process id."""
        pid = self.replicas()[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for_replicas(self, count: int) -> None:
        """Wait until this many replicas run."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(self.replicas()) < count:
            assert time.monotonic() < deadline, f"{len(self.replicas())} of {count} replicas run"
            time.sleep(0.2)

    def stats(self) -> dict[str, Any]:
        """What the gateway reports at `/stats`."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=_PATIENCE_SECONDS) as response:
            stats: dict[str, Any] = json.load(response)
        return stats

    def states(self) -> dict[str, int]:
        """Number of replicas by state, as the gateway reports it at `/stats`; none while it does not know."""
        states: dict[str, int] = (self.stats()["replicas"] or {"model": {}})["model"]
        return states

    def wait_for_states(self, **states: int) -> None:
        """Wait until the gateway reports these numbers of replicas."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.states()) != states:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, of their children, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the name in brackets, which may contain any text; the fourth is the parent.
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]
