"""A private Ray head for one job directory on this machine: started, found again, and ended without a trace.

It listens on 127.0.0.1 only, behind a token of its own, keeps everything in one folder under /tmp (the names of unix
sockets are limited to 107 bytes, so not in the job's directory), and knows nothing of other Rays: `ray stop` would end
those too, so it is ended by its processes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotune.errors import InfrastructureError
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError
from spotune_trainer.supervisor.ray_head.processes import Family, Process, boot_id, command_line, find_process

_START_ATTEMPTS = 3
_START_TIMEOUT_SECONDS = 120.0
_ANSWER_TIMEOUT_SECONDS = 5.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's minimum is 75 MiB; models and data never go through the object store."""
_MARK = "SPOTUNE_LOCAL_RAY"
_PARTS = {"gcs": "/gcs_server ", "raylet": "/raylet ", "dashboard": "/dashboard.py "}
"""The processes without which a head is dead, by what their command lines hold."""


@dataclass(frozen=True)
class RunningRay:
    """A head that runs, as `supervisor.json` records it.

    Attributes:
        url: of the Jobs API.
        address: of the control service, for `ray.init`.
        temporary: folder of its logs, sockets and token.
        family: all of its processes.
        parts: those without which it is dead, by name.
        slots: workers that it has room for.
    """

    url: str
    address: str
    temporary: Path
    family: Family
    parts: Mapping[str, Process]
    slots: int

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {**asdict(self), "temporary": str(self.temporary)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunningRay:
        """The head that `to_json` recorded."""
        family = record["family"]
        return cls(
            url=record["url"],
            address=record["address"],
            temporary=Path(record["temporary"]),
            family=Family(Process(**family["leader"]), family["boot"], family["mark"]),
            parts={name: Process(**part) for name, part in record["parts"].items()},
            slots=record["slots"],
        )

    def client(self, timeout_seconds: float = 30.0) -> JobsClient:
        """A client of its Jobs API."""
        return JobsClient(self.url, _token(self.temporary).read_text(), timeout_seconds)

    def is_alive(self) -> bool:
        """Whether all of its parts run."""
        return self.family.boot == boot_id() and all(part.is_alive() for part in self.parts.values())

    def answers(self) -> bool:
        """Whether it is alive and its Jobs API answers."""
        try:
            return self.is_alive() and bool(self.client(_ANSWER_TIMEOUT_SECONDS).version())
        except (JobsUnavailableError, FileNotFoundError):
            return False

    def end(self) -> None:
        """End all of its processes and remove its folder."""
        self.family.end()
        shutil.rmtree(self.temporary, ignore_errors=True)


class LocalRay:
    """The head of one job directory.

    Args:
        directory: the job's directory.
        slots: workers that it has room for.
        gpus: whether these are GPUs.
    """

    def __init__(self, directory: Path, slots: int, *, gpus: bool) -> None:
        self._log = directory / "logs" / "ray-start.log"
        self._temporary = temporary_folder(directory)
        self._mark = mark(directory)
        self._slots = slots
        self._resources = ["--num-cpus", str(slots), "--num-gpus", str(slots if gpus else 0)]
        self.running: RunningRay | None = None

    def find(self, record: Mapping[str, Any] | None) -> bool:
        """Take over the head of an earlier supervisor, if it is well and has the right size; another one is ended.

        Args:
            record: what the earlier supervisor recorded; None where there was none.
        """
        earlier = RunningRay.from_json(record) if record else None
        if earlier is not None and earlier.slots == self._slots and earlier.answers():
            self.running = earlier
            return True
        if earlier is not None:
            earlier.end()
        return False

    def start(self) -> None:
        """Start a head.

        Raises:
            InfrastructureError: Ray cannot be started; the text ends with what it said.
        """
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            try:
                self.running = self._start()
                return
            except InfrastructureError:
                if attempts_left == 0:
                    raise

    def is_alive(self) -> bool:
        """Whether all of its parts run."""
        return self.running is not None and self.running.is_alive()

    def client(self) -> JobsClient:
        """A client of its Jobs API."""
        assert self.running is not None
        return self.running.client()

    def record(self) -> dict[str, Any] | None:
        """What `find` needs to find it again."""
        return self.running.to_json() if self.running else None

    def end(self) -> None:
        """End it, if it runs."""
        if self.running is not None:
            self.running.end()
            self.running = None

    def _start(self) -> RunningRay:
        _end_unrecorded(self._mark)
        _make_private(self._temporary)
        _write_token(_token(self._temporary))
        dashboard_port, metrics_port = free_ports(2)
        environment = _environment(self._temporary, self._mark, metrics_port)
        command = _command(self._temporary, dashboard_port, self._resources)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            starter = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        family = Family(find_process(starter.pid), boot_id(), self._mark)
        try:
            self._wait_for(starter)
            return self._describe(family, dashboard_port)
        except BaseException:
            family.end()
            starter.wait()
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _wait_for(self, starter: subprocess.Popen[bytes]) -> None:
        try:
            code = starter.wait(_START_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(
                f"Ray did not start within {_START_TIMEOUT_SECONDS:.0f} s{self._said()}"
            ) from error
        if code != 0:
            raise InfrastructureError(f"Ray did not start (exit code {code}){self._said()}")

    def _describe(self, family: Family, dashboard_port: int) -> RunningRay:
        lines = {process: command_line(process) + " " for process in family.members()}
        parts = {name: process for name, sign in _PARTS.items() for process, line in lines.items() if sign in line}
        if missing := sorted(_PARTS.keys() - parts.keys()):
            raise InfrastructureError(f"Ray started without {', '.join(missing)}{self._said()}")
        address = (self._temporary / "ray" / "ray_current_cluster").read_text().strip()
        return RunningRay(f"http://127.0.0.1:{dashboard_port}", address, self._temporary, family, parts, self._slots)

    def _said(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()} (all of it is in {self._log})" if lines else ""


def temporary_folder(directory: Path) -> Path:
    """The folder under /tmp for a job directory: short, and the same every time."""
    name = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    return Path("/tmp") / f"spotune-{os.getuid()}-{name}"  # noqa: S108 - private: made with 0700 or refused


def mark(directory: Path) -> str:
    """The entry of the environment by which all that runs in the Ray of a job directory is known."""
    return f"{_MARK}={temporary_folder(directory)}"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _end_unrecorded(mark: str) -> None:
    """End what bears our mark and was never recorded: the supervisor was killed while it started Ray."""
    Family(None, boot_id(), mark).end()


def _make_private(folder: Path) -> None:
    """An empty folder that only we can read.

    Raises:
        InfrastructureError: somebody else owns that name.
    """
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise InfrastructureError(f"{folder} belongs to somebody else; remove it, or use another job directory")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / "tmp").mkdir()


def _token(temporary: Path) -> Path:
    return temporary / "token"


def _write_token(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(32))


def _command(temporary: Path, dashboard_port: int, resources: list[str]) -> list[str]:
    return [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head"),
        *("--temp-dir", str(temporary / "ray")),
        *("--port", "0", "--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--object-store-memory", str(_OBJECT_STORE_BYTES), "--include-log-monitor", "false"),
        *("--disable-usage-stats", "--log-color", "false", *resources),
    ]


def _environment(temporary: Path, mark: str, metrics_port: int) -> dict[str, str]:
    """The environment of Ray, and of the driver and workers within it."""
    name, value = mark.split("=", 1)
    kept = {key: text for key, text in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON")}
    return {
        **kept,
        name: value,
        "DASHBOARD_METRIC_PORT": str(metrics_port),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_token(temporary)),
        # Ray's switch for laptops: every node is 127.0.0.1, and no port is open to the network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_START_HOOK": "spotune_trainer.supervisor.ray_head.start_hook.leave_out_what_one_job_does_not_need",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Whatever a killed process leaves in its temporary folder goes with ours.
        "TMPDIR": str(temporary / "tmp"),
    }
