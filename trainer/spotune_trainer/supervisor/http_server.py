"""Progress over HTTP: `/progress` for programs and people, `/metrics` for Prometheus, `/healthz` for the kubelet.

Everything comes from `status.json` at the moment of the request; there is no state here.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory

_POLL_SECONDS = 0.05
_FOLLOW_SECONDS = 1.0
_FULL_BYTES = 1 << 20
"""With less than this a volume counts as full."""
_IDLE_SECONDS = 60
"""A connection without a request, or on which nothing can be sent, is closed after this time."""
_MOST_BODY_BYTES = 4096
_MOST_UNREAD_BLOCKS = 256
_GAUGES = {
    "step": ("step", "Optimizer steps done."),
    "totalSteps": ("total_steps", "Optimizer steps of the whole run."),
    "epoch": ("epoch", "Passes over the training data."),
    "loss": ("loss", "Training loss of the last step, per token."),
    "evalLoss": ("eval_loss", "Loss of the last evaluation, per token."),
    "learningRate": ("learning_rate", "Learning rate of the last step."),
    "gradNorm": ("gradient_norm", "Norm of the last step's gradients before clipping."),
    "tokensPerSecond": ("tokens_per_second", "Label tokens trained on per second, over all workers."),
    "samplesPerSecond": ("samples_per_second", "Samples trained on per second, over all workers."),
    "mfu": ("mfu_ratio", "Model FLOPs utilisation."),
    "etaSeconds": ("eta_seconds", "Estimated time to the last step."),
    "generation": ("generation", "Worker groups started so far."),
    "attempt": ("attempt", "Drivers started so far."),
    "goodput": ("goodput_ratio", "Productive time over wall clock, over all generations."),
}


@dataclass(frozen=True)
class Page:
    """A whole answer."""

    status: HTTPStatus
    kind: str
    text: str


@dataclass(frozen=True)
class Stream:
    """An answer that goes on, perhaps for ever.

    Attributes:
        texts: its parts, made with a function that waits a little and says whether anybody still listens.
    """

    texts: Callable[[Callable[[], bool]], Iterator[str]]


Query = Mapping[str, str]
"""Parameters of a URL; of one that is given several times the last."""


class ProgressServer:
    """Serves one job's progress from threads of its own; a context manager.

    Args:
        directory: of the job.
        sickness: why the job is not well, or None while it is; asked by `/healthz`.
        host: address to listen on.
        port: 0 for any free one.
        pages: further answers to GET by path, or others than ours.
        actions: answers to POST by path, made from the body.
    """

    def __init__(
        self,
        directory: JobDirectory,
        sickness: Callable[[], str | None],
        host: str = "127.0.0.1",
        port: int = 0,
        pages: Mapping[str, Callable[[Query], Page | Stream]] = MappingProxyType({}),
        actions: Mapping[str, Callable[[bytes], Page]] = MappingProxyType({}),
    ) -> None:
        class Handler(_Handler):
            pass

        Handler.pages = {
            "/progress": lambda _: _progress_page(read_status(directory)),
            "/metrics": lambda _: _metrics_page(read_status(directory)),
            "/healthz": lambda _: _health_page(sickness()),
            **pages,
        }
        Handler.actions = actions
        Handler.closing = self._closing = threading.Event()
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="progress-server", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it can be reached from this machine."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page of the path, by GET, or the action of the path, by POST."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    pages: Mapping[str, Callable[[Query], Page | Stream]]
    actions: Mapping[str, Callable[[bytes], Page]]
    closing: threading.Event

    def do_GET(self) -> None:
        """Answer with a page, or name those that there are."""
        url = urlsplit(self.path)
        page = self.pages.get(url.path)
        if page is None:
            self._refuse(url.path, self.actions, "POST")
            return
        try:
            answer = page(dict(parse_qsl(url.query)))
        except OSError as error:  # the volume is away
            answer = Page(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")
        if isinstance(answer, Page):
            self._send(answer)
        else:
            self._stream(answer)

    def do_POST(self) -> None:
        """Do what the path says, or name what there is."""
        path = urlsplit(self.path).path
        action = self.actions.get(path)
        length = self.headers.get("Content-Length", "0")
        if action is None:
            self._refuse(path, self.pages, "GET")
            self._leave_the_rest()
        elif "Transfer-Encoding" in self.headers or not length.isdecimal() or int(length) > _MOST_BODY_BYTES:
            reason = f"send a body with a Content-Length of at most {_MOST_BODY_BYTES} bytes\n"
            self._send(Page(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain", reason))
            self._leave_the_rest()
        else:
            self._send(action(self.rfile.read(int(length))))

    def _leave_the_rest(self) -> None:
        """Close without having read the body, but late: closing at once would take the answer back on its way."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_FOLLOW_SECONDS)
            for _ in range(_MOST_UNREAD_BLOCKS):
                if not self.connection.recv(_MOST_BODY_BYTES):
                    return

    def _refuse(self, path: str, others: Mapping[str, Any], method: str) -> None:
        if path in others:
            self._send(Page(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", f"{path} is for {method}\n"), allow=method)
            return
        known = ", ".join([*self.pages, *(f"POST {name}" for name in self.actions)])
        self._send(Page(HTTPStatus.NOT_FOUND, "text/plain", f"there is {known}\n"))

    def _send(self, page: Page, allow: str = "") -> None:
        content = page.text.encode()
        self.send_response(page.status)
        self.send_header("Content-Type", f"{page.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, stream: Stream) -> None:
        """Send the parts as they come: in chunks, or to a client of HTTP/1.0 until the connection closes."""
        chunked = self.request_version != "HTTP/1.0"
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError, TimeoutError):  # who read it has seen enough
            for text in stream.texts(self._is_listened_to):
                content = text.encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content) if chunked else content)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")

    def _is_listened_to(self) -> bool:
        """Wait a little; whether the client is still there, and the server too."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | select.POLLHUP)
        if poll.poll(_FOLLOW_SECONDS * 1000):
            if self.connection.recv(1, socket.MSG_PEEK) == b"":
                return False
            time.sleep(_FOLLOW_SECONDS)  # it has sent more, which nobody will read
        return not self.closing.is_set()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Requests are not worth a line."""


def read_status(directory: JobDirectory) -> dict[str, Any] | None:
    """What the driver last published, with its age; None before it has.

    On a volume without any space left nobody can publish that there is none, so that is seen from here.

    Raises:
        OSError, ValueError: the volume is away, or the file is damaged.
    """
    status: dict[str, Any] | None = files.read_json(directory.status)
    if status is not None:
        status["ageSeconds"] = round(max(0.0, time.time() - status["time"]), 3)
        status["checkpointProblem"] = _full(directory.root) or status.get("checkpointProblem")
    return status


def _full(path: Path) -> str | None:
    """That a volume is full, in words; None while there is space for a status."""
    volume = os.statvfs(path)
    free, size = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
    if free > _FULL_BYTES:
        return None
    return f"No space left on the volume, of whose {size / 1e9:,.1f} GB {free / 1e6:,.1f} MB are free"


def _progress_page(status: dict[str, Any] | None) -> Page:
    if status is None:
        text = '{"message": "the driver has not started yet"}\n'
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", text)
    return Page(HTTPStatus.OK, "application/json", json.dumps(status) + "\n")


def _health_page(sickness: str | None) -> Page:
    if sickness is not None:
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", sickness + "\n")
    return Page(HTTPStatus.OK, "text/plain", "ok\n")


def _metrics_page(status: dict[str, Any] | None) -> Page:
    lines = metrics_lines(status or {})
    return Page(HTTPStatus.OK, "text/plain; version=0.0.4", "".join(f"{line}\n" for line in lines))


def metrics_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The lines of Prometheus' text format for a status with `ageSeconds`; unknown values are left out."""
    for field, (name, meaning) in _GAUGES.items():
        yield from _metric(name, "gauge", meaning, {"": status.get(field)})
    scores = {f'{{metric="{metric}"}}': score for metric, score in (status.get("evalScores") or {}).items()}
    yield from _metric("eval_score", "gauge", "Scores of the last evaluation's answers.", scores)
    yield from _metric("status_age_seconds", "gauge", "Age of these figures.", {"": status.get("ageSeconds")})
    checkpoint = status.get("lastCheckpoint") or {}
    yield from _metric("checkpoint_step", "gauge", "Step of the last commit.", {"": checkpoint.get("step")})
    yield from _metric(
        "checkpoint_timestamp_seconds", "gauge", "Unix time of the last commit.", {"": checkpoint.get("time")}
    )
    workers = {f'{{state="{state}"}}': count for state, count in (status.get("workers") or {}).items()}
    yield from _metric("workers", "gauge", "Workers running and wanted.", workers)
    restarts = {f'{{cause="{cause}"}}': count for cause, count in (status.get("restarts") or {}).items()}
    yield from _metric("restarts_total", "counter", "Ends of worker groups and drivers by cause.", restarts)
    yield from _metric("steps_lost_total", "counter", "Steps trained and then lost.", {"": status.get("stepsLost")})
    parts = {f'{{part="{part}"}}': seconds for part, seconds in (status.get("goodputParts") or {}).items()}
    yield from _metric("time_seconds", "gauge", "Where the time went; the parts sum to the wall clock.", parts)
    phase = {f'{{phase="{status["phase"]}"}}': 1} if "phase" in status else {}
    yield from _metric("phase", "gauge", "1 for what the run is doing.", phase)


def _metric(name: str, kind: str, meaning: str, samples: Mapping[str, float | None]) -> Iterator[str]:
    known = {labels: value for labels, value in samples.items() if value is not None}
    if known:
        yield f"# HELP spotune_{name} {meaning}"
        yield f"# TYPE spotune_{name} {kind}"
    for labels, value in known.items():
        yield f"spotune_{name}{labels} {value:.17g}"
