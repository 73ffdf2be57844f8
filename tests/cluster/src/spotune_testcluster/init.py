"""PID 1 of a cluster and of every node: keeps components running, reaps child processes, serves a Unix socket.

A component that exits is restarted after a short delay, as by systemd, unless it was stopped on purpose. Requests and
responses are JSON objects, one per line: {"do": NAME, ...} in, {"answer": ...} or {"error": SENTENCE} out.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune_testcluster.errors import ClusterError, NotRunningError

SECONDS_TO_RESTART = 0.3
SECONDS_TO_STOP = 3.0
SECONDS_TO_ANSWER = 60.0

Operation = Callable[[Mapping[str, Any]], Any]


@dataclass
class Component:
    """One process that an init keeps running.

    Attributes:
        command: Program and arguments.
        log: Its output is appended here.
        environment: Variables in addition to those of the init.
    """

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    start_after: float = 0.0

    def start(self) -> None:
        """Start the process in a new session."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        self.starts += 1

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self.process is not None:
            os.kill(self.process.pid, number)


class Init:
    """The first process of a PID namespace."""

    def __init__(self, path: Path) -> None:
        self.components: dict[str, Component] = {}
        self.operations: dict[str, Operation] = {
            "status": self._status,
            "stop": self._stop,
            "start": self._start,
            "restart": self._restart,
            "pause": self._pause,
            "continue": self._continue,
        }
        self.on_death: Callable[[int], None] = lambda _pid: None
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._woken, waker = socket.socketpair()
        self._waker = waker
        self._woken.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def add(self, name: str, component: Component) -> None:
        """Start a component and keep it running. It replaces one of the same name."""
        if name in self.components:
            self._end(self.components[name])
        self.components[name] = component
        component.start()

    def run(self) -> None:
        """Serve requests and keep components running, forever. When it exits, so does the namespace."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=SECONDS_TO_RESTART):
                    if key.fileobj is self._listener:
                        self._answer_one()
                    else:
                        self._woken.recv(4096)
                self.reap()
                self._start_what_is_due()

    def reap(self) -> None:
        """Reap all exited processes: components, and orphans of other processes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.on_death(pid)
            for component in self.components.values():
                if component.process is not None and component.process.pid == pid:
                    component.process.returncode = status
                    component.process = None
                    component.start_after = time.monotonic() + SECONDS_TO_RESTART

    def _start_what_is_due(self) -> None:
        for component in self.components.values():
            if component.wanted and component.process is None and time.monotonic() >= component.start_after:
                component.start()

    def _answer_one(self) -> None:
        connection, _ = self._listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SECONDS_TO_ANSWER)
            question = json.loads(connection.makefile("rb").readline() or b"{}")
            connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        operation = self.operations.get(question.get("do", ""))
        if operation is None:
            return {"error": f"{question.get('do')!r} is not one of {', '.join(self.operations)}"}
        try:
            return {"answer": operation(question)}
        except (OSError, subprocess.SubprocessError, ClusterError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _component(self, question: Mapping[str, Any]) -> Component:
        name = question.get("component", "")
        if name not in self.components:
            raise NotRunningError(f"there is no component {name!r}, only {', '.join(self.components)}")
        return self.components[name]

    def _status(self, _question: Mapping[str, Any]) -> dict[str, Any]:
        self.reap()
        return {
            name: {"running": component.process is not None, "wanted": component.wanted, "starts": component.starts}
            for name, component in self.components.items()
        }

    def _stop(self, question: Mapping[str, Any]) -> None:
        component = self._component(question)
        component.wanted = False
        self._end(component)

    def _start(self, question: Mapping[str, Any]) -> None:
        component = self._component(question)
        component.wanted = True
        if component.process is None:
            component.start()

    def _restart(self, question: Mapping[str, Any]) -> None:
        component = self._component(question)
        self._end(component)
        component.wanted = True
        component.start()

    def _pause(self, question: Mapping[str, Any]) -> None:
        self._component(question).send(signal.SIGSTOP)

    def _continue(self, question: Mapping[str, Any]) -> None:
        self._component(question).send(signal.SIGCONT)

    def _end(self, component: Component) -> None:
        """Stop a component by SIGTERM, and by SIGKILL if it does not exit in time."""
        component.send(signal.SIGCONT)
        component.send(signal.SIGTERM)
        kill_at = time.monotonic() + SECONDS_TO_STOP
        while component.process is not None:
            time.sleep(0.01)
            self.reap()
            if time.monotonic() > kill_at:
                component.send(signal.SIGKILL)


def ask(path: Path, do: str, **details: Any) -> Any:
    """Send a request to an init through its socket and return the response.

    Raises:
        NotRunningError: No process listens at `path`.
        ClusterError: The operation failed; the message has the reason.
    """
    with _connected(path) as connection:
        connection.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
        line = connection.makefile("rb").readline()
    if not line:
        raise NotRunningError(f"the process that listens at {path} exited before it responded")
    reply = json.loads(line)
    if "error" in reply:
        raise ClusterError(reply["error"])
    return reply["answer"]


def process_id(path: Path) -> int | None:
    """The process id of the init that listens at `path`, in the caller's PID namespace; None if there is none."""
    try:
        connection = _connected(path)
    except NotRunningError:
        return None
    with connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        connection.sendall(b'{"do": "status"}\n')
        pid: int = struct.unpack("3i", credentials)[0]
        return pid


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(SECONDS_TO_ANSWER)
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise NotRunningError(f"no process listens at {path}: {error}") from error
    return connection
