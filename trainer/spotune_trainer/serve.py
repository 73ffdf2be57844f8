"""Progress over HTTP: `/progress` for programs and people, `/metrics` for Prometheus, `/healthz` for the kubelet.

Everything comes from `status.json` at the moment of the request; there is no state here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from spotune_trainer import files
from spotune_trainer.layout import JobDirectory

_POLL_SECONDS = 0.05
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
}


class ProgressServer:
    """Serves one job's progress from a thread of its own; a context manager.

    Args:
        directory: of the job.
        sickness: why the job is not well, or None while it is; asked by `/healthz`.
        host: address to listen on.
        port: 0 for any free one.
    """

    def __init__(
        self, directory: JobDirectory, sickness: Callable[[], str | None], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        class Handler(_Handler):
            pages: Mapping[str, Callable[[], _Page]] = {
                "/progress": lambda: _progress_page(_read(directory)),
                "/metrics": lambda: _metrics_page(_read(directory)),
                "/healthz": lambda: _health_page(sickness()),
            }

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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_Page = tuple[HTTPStatus, str, str]
"""Status, content type and text."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET with the page of the path."""

    pages: Mapping[str, Callable[[], _Page]] = {}

    def do_GET(self) -> None:
        """Answer with a page, or name those that there are."""
        page = self.pages.get(self.path.partition("?")[0])
        known = ", ".join(self.pages)
        status, kind, text = page() if page else (HTTPStatus.NOT_FOUND, "text/plain", f"there is {known}\n")
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Requests are not worth a line."""


def _read(directory: JobDirectory) -> dict[str, Any] | None:
    status: dict[str, Any] | None = files.read_json(directory.status)
    if status is not None:
        status["ageSeconds"] = round(max(0.0, time.time() - status["time"]), 3)
    return status


def _progress_page(status: dict[str, Any] | None) -> _Page:
    if status is None:
        return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", '{"message": "the driver has not started yet"}\n'
    return HTTPStatus.OK, "application/json", json.dumps(status) + "\n"


def _health_page(sickness: str | None) -> _Page:
    if sickness is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", sickness + "\n"
    return HTTPStatus.OK, "text/plain", "ok\n"


def _metrics_page(status: dict[str, Any] | None) -> _Page:
    return HTTPStatus.OK, "text/plain; version=0.0.4", "".join(f"{line}\n" for line in metrics_lines(status or {}))


def metrics_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The lines of Prometheus' text format for a status with `ageSeconds`; unknown values are left out."""
    for field, (name, meaning) in _GAUGES.items():
        yield from _metric(name, "gauge", meaning, {"": status.get(field)})
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
    phase = {f'{{phase="{status["phase"]}"}}': 1} if "phase" in status else {}
    yield from _metric("phase", "gauge", "1 for what the run is doing.", phase)


def _metric(name: str, kind: str, meaning: str, samples: Mapping[str, float | None]) -> Iterator[str]:
    known = {labels: value for labels, value in samples.items() if value is not None}
    if known:
        yield f"# HELP spotune_{name} {meaning}"
        yield f"# TYPE spotune_{name} {kind}"
    for labels, value in known.items():
        yield f"spotune_{name}{labels} {value:.17g}"
