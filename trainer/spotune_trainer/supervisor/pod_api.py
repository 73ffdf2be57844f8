"""The HTTP API of a pod's supervisor: its progress and state, the run's logs, and requests to stop and start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase, read_status
from spotune_trainer.observability.logs import run_logs
from spotune_trainer.observability.surviving_workers import SurvivingWorkers
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.http_server import Query, Response, StreamingResponse, is_number_up_to

_DEFAULT_GRACE_SECONDS = 60.0
_MAX_GRACE_SECONDS = 3600.0
_MAX_LINES = 100_000


class PodApi:
    """The routes of one job in a pod, in addition to those of `ProgressServer`.

    Args:
        directory: of the job.
        control: receives the requests to stop and start.
        status: the supervisor's part of `/progress`.
    """

    def __init__(self, directory: JobDirectory, control: ControlSignals, status: SupervisorStatus) -> None:
        self._directory = directory
        self._control = control
        self._supervisor = status
        self._surviving = SurvivingWorkers(directory)
        self._last_status: dict[str, Any] = {}
        self._started = time.monotonic()

    @property
    def get_routes(self) -> Mapping[str, Callable[[Query], Response | StreamingResponse]]:
        """Handlers of GET by path."""
        return {"/progress": self._progress, "/logs": self._logs}

    @property
    def post_routes(self) -> Mapping[str, Callable[[bytes], Response]]:
        """Handlers of POST by path."""
        return {"/stop": self._stop, "/start": self._start}

    def _progress(self, _query: Query) -> Response:
        own = {
            "supervisor": self._supervisor.as_json(),
            "supervisorSeconds": round(time.monotonic() - self._started, 3),
        }
        return _json(HTTPStatus.OK, {**self._status(), **own})

    def _status(self) -> dict[str, Any]:
        """The driver's status, or what its workers do without it; while it cannot be read, the last one that could."""
        try:
            status = read_status(self._directory)
            shown = self._surviving.shown(status, status["ageSeconds"]) if status is not None else None
        except (OSError, ValueError) as error:
            age = {"ageSeconds": round(time.time() - self._last_status["time"], 3)} if self._last_status else {}
            return {
                "phase": Phase.STARTING.value,
                **self._last_status,
                **age,
                "message": f"the status cannot be read: {error}",
            }
        self._last_status = status or {}
        return shown or {"phase": Phase.STARTING.value}

    def _logs(self, query: Query) -> Response | StreamingResponse:
        lines = query.get("lines")
        if lines is not None and not is_number_up_to(lines, _MAX_LINES):
            return _bad_request(f"lines={lines[:20]}: give a whole number up to {_MAX_LINES}")
        follow, count = query.get("follow", "0") == "1", int(lines) if lines is not None else None

        def texts(wait: Callable[[], bool]) -> Iterator[str]:
            return run_logs.stream(self._directory, count, wait if follow else None)

        return StreamingResponse(texts)

    def _stop(self, body: bytes) -> Response:
        try:
            request: Any = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError) as error:
            return _bad_request(f'the body is not JSON ({error}): send {{"seconds": 60}}, or nothing')
        seconds: Any = request.get("seconds", _DEFAULT_GRACE_SECONDS) if isinstance(request, dict) else None
        if type(seconds) not in (int, float) or not 0 < seconds <= _MAX_GRACE_SECONDS:
            maximum = f"{_MAX_GRACE_SECONDS:.0f}"
            return _bad_request(f'send {{"seconds": N}}, with N up to {maximum} for the last commit, or nothing for 60')
        self._control.suspend(float(seconds))
        return _json(HTTPStatus.OK, self._supervisor.as_json())

    def _start(self, _body: bytes) -> Response:
        self._control.resume()
        return _json(HTTPStatus.OK, self._supervisor.as_json())


def _json(status: HTTPStatus, content: Mapping[str, Any]) -> Response:
    return Response(status, "application/json", json.dumps(content) + "\n")


def _bad_request(message: str) -> Response:
    return _json(HTTPStatus.BAD_REQUEST, {"message": message})
