"""A driver whose imports are done before Ray can start one: both the process that waits, and the Ray job that uses it.

Ray's start takes about as long as the imports of a driver. So a head on this machine starts an early driver beside Ray.
It listens on a UNIX socket. The Ray job of the first attempt connects, and hands over its arguments, environment,
working directory and output; then it ends as the early driver ends. If there is none, or it dies before it has begun,
the Ray job is the driver itself.

Must be cheap to import: the Ray job is to begin at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from spotune_trainer.job_directory.process_marker import EARLY_DRIVER_SOCKET

_UNUSED_SECONDS = 300.0
_KILL_AFTER_SECONDS = 2
"""From SIGTERM to SIGKILL of the early driver. Ray kills its job after 3 s, and so could not kill a stopped one."""
_BEGUN = b"+"
_OUTPUT = (0, 1, 2)
_PEER_CREDENTIALS = struct.Struct("3i")


def wait_for_job(path: Path, prepare: Callable[[], None], run: Callable[[list[str]], int]) -> NoReturn:
    """Be the early driver: prepare, wait for the Ray job, run as it, and end the process.

    Args:
        path: of the socket that is made.
        prepare: imports.
        run: the driver; gets the arguments of the Ray job, and returns the exit code of the process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_UNUSED_SECONDS)
        prepare()
        try:
            job, _ = listener.accept()
        except TimeoutError:
            os._exit(0)
        finally:
            path.unlink(missing_ok=True)
    arguments = _become(job)
    code = 1  # of an exception
    try:
        code = run(arguments)
    except Exception:  # noqa: BLE001 - it ends the process, as if nobody had caught it
        sys.excepthook(*sys.exc_info())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    job.sendall(bytes([code]))
    # Everything is on the volume; an orderly end of Ray's client would take seconds that nobody needs.
    os._exit(code)


def run_in_early_driver(arguments: Sequence[str]) -> int | None:
    """Be the Ray job: let the early driver run, and return its exit code. None if there is none.

    Ends this process by SIGKILL if the early driver is killed.
    """
    path = os.environ.get(EARLY_DRIVER_SOCKET)
    if not path:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as driver:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until it is known what to do with one
        try:
            driver.connect(path)
            _hand_over(driver, arguments)
            if driver.recv(1) != _BEGUN:
                return None
            _forward_termination(driver)
        except OSError:
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = driver.recv(1)
    if not code:
        os.kill(os.getpid(), signal.SIGKILL)
    return code[0]


def _hand_over(driver: socket.socket, arguments: Sequence[str]) -> None:
    message = json.dumps(
        {"arguments": list(arguments), "environment": dict(os.environ), "folder": str(Path.cwd())}
    ).encode()
    socket.send_fds(driver, [len(message).to_bytes(4, "big")], list(_OUTPUT))
    driver.sendall(message)


def _become(job: socket.socket) -> list[str]:
    """Take over what the Ray job hands over, and end with it from now on. Returns its arguments."""
    length, descriptors, _, _ = socket.recv_fds(job, 4, len(_OUTPUT))
    for descriptor, number in zip(descriptors, _OUTPUT, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with job.makefile("rb") as stream:
        message: dict[str, Any] = json.loads(stream.read(int.from_bytes(length, "big")))
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    arguments: list[str] = message["arguments"]
    sys.argv[1:] = arguments
    job.sendall(_BEGUN)
    threading.Thread(target=_follow, args=(job,), name="ray-job", daemon=True).start()
    return arguments


def _follow(job: socket.socket) -> None:
    """End this process once the Ray job has ended."""
    with suppress(ConnectionResetError):  # it was killed before it had read that the driver has begun
        job.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _forward_termination(driver: socket.socket) -> None:
    """From now on, end the driver with SIGTERM when this process gets one, and soon after with SIGKILL."""
    credentials = driver.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, _, _ = _PEER_CREDENTIALS.unpack(credentials)

    def terminate(*_: object) -> None:
        signal.alarm(_KILL_AFTER_SECONDS)
        os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.signal(signal.SIGTERM, terminate)
