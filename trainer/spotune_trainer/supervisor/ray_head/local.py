"""A private Ray head for one job directory on this machine: start it, reattach to it, and remove it completely.

The head listens on 127.0.0.1 only and requires a token of its own. All of its files are in one folder under /tmp: the
job's directory could make paths of unix sockets longer than the limit of 107 bytes. `ray stop` would also end the other
Rays of this machine, so the head is shut down by killing its own processes.
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
from threading import Thread
from typing import IO, Any

from spotune.errors import InfrastructureError
from spotune_trainer.job_directory.process_marker import AGENT_MARKER, EARLY_DRIVER_SOCKET
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError
from spotune_trainer.supervisor.ray_head.processes import Process, ProcessFamily, boot_id, command_line, find_process

_START_ATTEMPTS = 3
_START_TIMEOUT_SECONDS = 120.0
_ANSWER_TIMEOUT_SECONDS = 5.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's minimum is 75 MiB; models and data never go through the object store."""
_TEMPORARY_FILES = "tmp"
_MARKER = "SPOTUNE_LOCAL_RAY"
_START_AGENT = "from spotune_trainer.worker_group.agent_link import start_early; start_early()"
_START_DRIVER = "from spotune_trainer.driver.__main__ import start_early; start_early()"
_RAY = "from spotune_trainer.supervisor.ray_head.start_hook import start_ray; start_ray()"
_PARTS = {"gcs": "/gcs_server ", "raylet": "/raylet ", "dashboard": "/dashboard.py "}
"""The processes that a head needs to work, and the text that identifies each by its command line."""


@dataclass(frozen=True)
class RunningRay:
    """A running head, as recorded in `supervisor.json`.

    Attributes:
        url: of the Jobs API.
        address: of Ray's global control service, for `ray.init`.
        temporary: folder of its logs, sockets and token.
        family: all of its processes.
        parts: the processes that it needs to work, by name.
        slots: capacity in workers.
    """

    url: str
    address: str
    temporary: Path
    family: ProcessFamily
    parts: Mapping[str, Process]
    slots: int

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        family = {"leader": asdict(self.family)["leader"], "boot": self.family.boot, "mark": self.family.marker}
        return {**asdict(self), "temporary": str(self.temporary), "family": family}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunningRay:
        """Inverse of `to_json`."""
        family = record["family"]
        return cls(
            url=record["url"],
            address=record["address"],
            temporary=Path(record["temporary"]),
            family=ProcessFamily(Process(**family["leader"]), family["boot"], family["mark"]),
            parts={name: Process(**part) for name, part in record["parts"].items()},
            slots=record["slots"],
        )

    def client(self, timeout_seconds: float = 30.0) -> JobsClient:
        """A client of its Jobs API."""
        return JobsClient(self.url, _token(self.temporary).read_text(), timeout_seconds)

    def is_alive(self) -> bool:
        """Whether all processes that it needs run."""
        return self.family.boot == boot_id() and all(part.is_alive() for part in self.parts.values())

    def is_responding(self) -> bool:
        """Whether it is alive and its Jobs API answers."""
        try:
            return self.is_alive() and bool(self.client(_ANSWER_TIMEOUT_SECONDS).version())
        except (JobsUnavailableError, FileNotFoundError):
            return False

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        """Kill all of its processes and remove its folder; perhaps without ranks, their agents and temporary files."""
        self.family.kill(spared=AGENT_MARKER if spares_ranks else "")
        _empty(self.temporary, keeps_temporary_files=spares_ranks)


class LocalRay:
    """The `RayHead` of one job directory on this machine.

    Args:
        directory: the job's directory.
        slots: capacity in workers.
        gpus: whether each slot has a GPU.
        starts_agent: start the agent of this machine beside Ray. Its imports take longer than Ray's start.
        starts_driver: start the process of the next driver beside Ray, for the same reason.
    """

    def __init__(
        self, directory: Path, slots: int, *, gpus: bool, starts_agent: bool = False, starts_driver: bool = False
    ) -> None:
        agent = ["-c", _START_AGENT, str(directory.absolute()), str(slots if gpus else 0)]
        self._early = [*([agent] if starts_agent else []), *([["-c", _START_DRIVER]] if starts_driver else [])]
        self._log = directory / "logs" / "ray-start.log"
        self._temporary = ray_folder(directory)
        self._marker = process_marker(directory)
        self._slots = slots
        self._resources = ["--num-cpus", str(slots), "--num-gpus", str(slots if gpus else 0)]
        self._spares_ranks = False
        self.running: RunningRay | None = None

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        """Take over the head of an earlier supervisor if it responds and has the same capacity; else shut it down."""
        if not record:
            return False
        earlier = RunningRay.from_json(record)
        if earlier.slots == self._slots and earlier.is_responding():
            self.running = earlier
            return True
        earlier.shut_down()
        return False

    def start(self) -> None:
        """Start a head.

        Raises:
            InfrastructureError: Ray cannot be started; the message ends with the last line of its log.
        """
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            try:
                self.running = self._start()
                return
            except InfrastructureError:
                if attempts_left == 0:
                    raise

    def is_alive(self) -> bool:
        """Whether all processes that the head needs run."""
        return self.running is not None and self.running.is_alive()

    def is_responding(self) -> bool:
        """Whether the head is alive and its Jobs API answers."""
        return self.running is not None and self.running.is_responding()

    def client(self) -> JobsClient:
        """A client of its Jobs API."""
        assert self.running is not None
        return self.running.client()

    def record(self) -> dict[str, Any] | None:
        """The running head as JSON values; None while there is none."""
        return self.running.to_json() if self.running else None

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        """Kill the head and remove its folder, if it runs; also what an earlier shutdown has spared."""
        if self.running is not None:
            self.running.shut_down(spares_ranks=spares_ranks)
        elif self._spares_ranks and not spares_ranks:
            _kill_unrecorded(self._marker)
            _empty(self._temporary, keeps_temporary_files=False)
        self.running = None
        self._spares_ranks = spares_ranks

    def _start(self) -> RunningRay:
        _kill_unrecorded(self._marker, spared=AGENT_MARKER if self._spares_ranks else "")
        _make_private(self._temporary, keeps_temporary_files=self._spares_ranks)
        _write_token(_token(self._temporary))
        dashboard_port, metrics_port = free_ports(2)
        environment = _environment(self._temporary, self._marker, metrics_port)
        command = _command(self._temporary, dashboard_port, self._resources)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            for early in self._early:
                process = _spawn([sys.executable, *early], environment, log)
                # It ends at any time, or is killed.
                Thread(target=process.wait, name="early-process", daemon=True).start()
            starter = _spawn(command, environment, log)
        family = ProcessFamily(find_process(starter.pid), boot_id(), self._marker)
        try:
            self._wait_for(starter)
            return self._describe(family, dashboard_port)
        except BaseException:
            family.kill(spared=AGENT_MARKER if self._spares_ranks else "")
            starter.wait()
            _empty(self._temporary, keeps_temporary_files=self._spares_ranks)
            raise

    def _wait_for(self, starter: subprocess.Popen[bytes]) -> None:
        try:
            code = starter.wait(_START_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(
                f"Ray did not start within {_START_TIMEOUT_SECONDS:.0f} s{self._log_tail()}"
            ) from error
        if code != 0:
            raise InfrastructureError(f"Ray did not start (exit code {code}){self._log_tail()}")

    def _describe(self, family: ProcessFamily, dashboard_port: int) -> RunningRay:
        lines = {process: command_line(process) + " " for process in family.members()}
        parts = {name: process for name, sign in _PARTS.items() for process, line in lines.items() if sign in line}
        if missing := sorted(_PARTS.keys() - parts.keys()):
            raise InfrastructureError(f"Ray started without {', '.join(missing)}{self._log_tail()}")
        address = (self._temporary / "ray" / "ray_current_cluster").read_text().strip()
        return RunningRay(f"http://127.0.0.1:{dashboard_port}", address, self._temporary, family, parts, self._slots)

    def _log_tail(self) -> str:
        """The last line of the log as the end of a message."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()} (the whole log is {self._log})" if lines else ""


def ray_folder(directory: Path) -> Path:
    """The folder under /tmp of a job directory's head: a short path that depends only on the directory."""
    name = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    return Path("/tmp") / f"spotune-{os.getuid()}-{name}"  # noqa: S108 - private: made with 0700 or refused


def process_marker(directory: Path) -> str:
    """`NAME=value`, the environment entry of every process that runs in the Ray of a job directory."""
    return f"{_MARKER}={ray_folder(directory)}"


def free_ports(count: int) -> list[int]:
    """`count` TCP ports of 127.0.0.1 that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _spawn(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process as the leader of its own session, with its output in a log."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _kill_unrecorded(marker: str, spared: str = "") -> None:
    """Kill a head that was never recorded, because its supervisor was killed while it started Ray."""
    ProcessFamily(None, boot_id(), marker).kill(spared=spared)


def _empty(folder: Path, *, keeps_temporary_files: bool) -> None:
    """Remove the folder of a head; keep the temporary files if processes that use them run on."""
    if not keeps_temporary_files:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.glob("*"):
        if path.name == _TEMPORARY_FILES:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _make_private(folder: Path, *, keeps_temporary_files: bool) -> None:
    """Make a folder that only this user can read; empty except for temporary files that are to be kept.

    Raises:
        InfrastructureError: the folder belongs to another user.
    """
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise InfrastructureError(f"{folder} belongs to another user: remove it, or use another job directory")
    _empty(folder, keeps_temporary_files=keeps_temporary_files)
    folder.mkdir(mode=0o700, exist_ok=keeps_temporary_files)
    (folder / _TEMPORARY_FILES).mkdir(exist_ok=keeps_temporary_files)


def _token(temporary: Path) -> Path:
    return temporary / "token"


def _write_token(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(32))


def _command(temporary: Path, dashboard_port: int, resources: list[str]) -> list[str]:
    return [
        *(sys.executable, "-c", _RAY, "start", "--head"),
        *("--temp-dir", str(temporary / "ray")),
        *("--port", "0", "--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--object-store-memory", str(_OBJECT_STORE_BYTES), "--include-log-monitor", "false"),
        *("--disable-usage-stats", "--log-color", "false", *resources),
    ]


def _environment(temporary: Path, marker: str, metrics_port: int) -> dict[str, str]:
    """The environment of Ray, which the driver and the workers inherit."""
    name, value = marker.split("=", 1)
    kept = {key: text for key, text in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON")}
    return {
        **kept,
        name: value,
        EARLY_DRIVER_SOCKET: str(temporary / "driver.sock"),
        "DASHBOARD_METRIC_PORT": str(metrics_port),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_token(temporary)),
        # Ray's switch for laptops: every node is 127.0.0.1, and no port is open to the network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_START_HOOK": "spotune_trainer.supervisor.ray_head.start_hook.start_only_needed_services",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Temporary files of killed processes are removed with the folder of the head.
        "TMPDIR": str(temporary / _TEMPORARY_FILES),
    }
