"""How a process reaches the agent of its node: requests over a UNIX socket, in a folder that only its user can enter.

Each request has a connection of its own: the name of a method and its arguments, then its result or error. The
connection of `Attachment` lasts as long as its driver has a process on the node. By it the agent knows that it has a
driver, and the driver that the agent lives.

Must be cheap to import: the agent is not started before.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final

from spotune.errors import InfrastructureError
from spotune_trainer.job_directory.process_marker import AGENT_MARKER

ATTACH: Final = "attach"
DESCRIBE: Final = "describe"
EXIT: Final = "exit"

_SOCKETS = "*.sock"
_THIS_MACHINE = "127.0.0.1"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.02


class AgentGoneError(InfrastructureError):
    """The agent of the node has ended."""


@dataclass(frozen=True)
class AgentState:
    """What an agent tells about itself.

    Attributes:
        gpus: whether its ranks train on GPUs.
        devices: the GPUs that it may use, as in CUDA_VISIBLE_DEVICES; None: all.
        ranks: number of ranks that run.
        driver: id of the driver that it serves; empty: it has none.
        has_trained: whether its last ranks have trained to the end, which nobody else can tell a next driver.
    """

    gpus: bool
    devices: str | None
    ranks: int
    driver: str
    has_trained: bool = False


def agents_folder(directory: str) -> Path:
    """The folder with the sockets of the agents of a job's directory on this machine; made if it does not exist.

    Raises:
        InfrastructureError: it belongs to another user.
    """
    digest = hashlib.sha256(directory.encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"spotune-agents-{os.getuid()}-{digest}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise InfrastructureError(f"{folder} belongs to another user: remove it")
    return folder


def all_agents() -> list[Path]:
    """The sockets of all agents of this user on this machine."""
    return sorted(Path(tempfile.gettempdir()).glob(f"spotune-agents-{os.getuid()}-*/{_SOCKETS}"))


def call(path: Path, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an agent, in its process.

    Args:
        path: its socket.
        method: of `NodeAgent`, or one of this module's constants.
        *args: of the method.
        **kwargs: of the method.

    Raises:
        AgentGoneError: it has ended, also if it ends meanwhile.
        Exception: what the method raises.
    """
    with _connected(path) as connection:
        return _ask(connection, method, args, kwargs)


class Attachment:
    """Makes an agent serve a driver for as long as this process lives.

    Args:
        path: socket of the agent.
        driver: id of the driver.
        secret: of the driver's worker groups.

    Raises:
        AgentGoneError: the agent has ended, or serves another process of the same driver.
    """

    def __init__(self, path: Path, driver: str, secret: bytes) -> None:
        self.path = path
        self._connection = _connected(path)
        if not _ask(self._connection, ATTACH, (driver, secret), {}):
            self._connection.close()
            raise AgentGoneError("the agent serves another node of the driver")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        return call(self.path, method, *args, **kwargs)

    def wait_for_exit(self) -> None:
        """Returns once the agent has ended, or serves another driver."""
        with suppress(EOFError, OSError):
            self._connection.recv()


def attach(
    folder: Path, driver: str, secret: bytes, address: str, *, gpus: bool, functions: bool = False
) -> Attachment:
    """Attach to the agent of this node, or start one.

    Of several, those with ranks that still run come first, then those whose ranks have trained to the end.

    Args:
        folder: with the sockets.
        driver: id of the driver.
        secret: of its worker groups.
        address: IP address by which other nodes reach this one.
        gpus: whether ranks train on GPUs.
        functions: whether ranks call a training function of the user; an agent that is started imports Ray Train.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sorted(_living(folder), key=lambda entry: (-entry[1].ranks, not entry[1].has_trained))
    for path, state in found:
        if state.driver == driver:
            continue
        if not state.ranks and (state.gpus, state.devices) != (gpus, devices):
            with suppress(AgentGoneError):  # its ranks could not use the GPUs of this node
                call(path, EXIT)
            continue
        with suppress(AgentGoneError):
            return Attachment(path, driver, secret)
    options = [*(["--gpus"] if gpus else []), *(["--functions"] if functions else [])]
    return Attachment(_start(folder, address, options), driver, secret)


def start_early(arguments: Sequence[str] | None = None) -> None:
    """Start an agent before there is a driver that could attach to it, so that its imports go on meanwhile.

    A head on this machine does so while Ray starts. If Ray gives the driver's actor other GPUs than these, `attach`
    replaces the agent.

    Args:
        arguments: the job's directory and the number of GPUs; by default those of the command line.
    """
    directory, count = arguments or sys.argv[1:]
    folder, gpus = agents_folder(directory), int(count)
    if any(folder.glob(_SOCKETS)):  # of an earlier head: its ranks train on
        return
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(device) for device in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:gpus])
    _start(folder, _THIS_MACHINE, ["--gpus"] if gpus else [])


def _living(folder: Path) -> Iterator[tuple[Path, AgentState]]:
    """The agents with sockets in a folder. Removes the sockets of those that have ended."""
    for path in sorted(folder.glob(_SOCKETS)):
        try:
            state: AgentState = call(path, DESCRIBE)
        except AgentGoneError:
            path.unlink(missing_ok=True)
        else:
            yield path, state


def _start(folder: Path, address: str, options: Sequence[str]) -> Path:
    """Start an agent with command line options, and wait for its socket, which is returned."""
    name, value = AGENT_MARKER.split("=")
    path = folder / f"{os.getpid()}-{time.monotonic_ns():x}.sock"
    code = "from spotune_trainer.worker_group.agent_daemon import main; main()"
    command = [sys.executable, "-c", code, str(path), address, *options]
    # It forks, so that nobody waits for it, and gets a session of its own: Ray ends neither it nor its ranks.
    starter = subprocess.Popen(
        command, env={**os.environ, name: value}, stdin=subprocess.DEVNULL, start_new_session=True
    )
    if starter.wait() != 0:
        raise InfrastructureError(f"the agent of the node could not be started: exit status {starter.returncode}")
    deadline = time.monotonic() + _START_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise InfrastructureError(f"the agent of the node did not start within {_START_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    return path


def _connected(path: Path) -> Connection:
    try:
        return Client(str(path), "AF_UNIX")
    except OSError as error:
        raise AgentGoneError(f"the agent of the node has ended: {error}") from error


def _ask(connection: Connection, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        connection.send((method, args, kwargs))
        error, value = connection.recv()
    except (EOFError, OSError) as gone:
        raise AgentGoneError("the agent of the node has ended") from gone
    if error is not None:
        raise error
    return value
