"""What the supervisor of a pod serves beyond progress: what it is doing, orders to stop and start, and the logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.logs import run_logs
from spotune_trainer.observability.progress import Phase
from spotune_trainer.supervisor.control import Orders, Standing
from spotune_trainer.supervisor.http_server import Page, Query, Stream, read_status

_STOP_SECONDS = 60.0
_MOST_STOP_SECONDS = 3600.0
_MOST_LINES = 100_000


class PodPages:
    """The pages and actions of one job in a pod.

    Args:
        directory: of the job.
        orders: that the actions give.
        standing: what the supervisor says of itself.
    """

    def __init__(self, directory: JobDirectory, orders: Orders, standing: Standing) -> None:
        self._directory = directory
        self._orders = orders
        self._standing = standing
        self._last: dict[str, Any] = {}

    @property
    def pages(self) -> Mapping[str, Callable[[Query], Page | Stream]]:
        """Answers to GET by path."""
        return {"/progress": self._progress, "/logs": self._logs}

    @property
    def actions(self) -> Mapping[str, Callable[[bytes], Page]]:
        """Answers to POST by path."""
        return {"/stop": self._stop, "/start": self._start}

    def _progress(self, _query: Query) -> Page:
        return _json(HTTPStatus.OK, {**self._status(), "supervisor": self._standing.as_json()})

    def _status(self) -> dict[str, Any]:
        """The driver's status; while it cannot be read the last one that could."""
        try:
            status = read_status(self._directory)
        except (OSError, ValueError) as error:
            age = {"ageSeconds": round(time.time() - self._last["time"], 3)} if self._last else {}
            return {
                "phase": Phase.STARTING.value,
                **self._last,
                **age,
                "message": f"the status cannot be read: {error}",
            }
        self._last = status or {}
        return status or {"phase": Phase.STARTING.value}

    def _logs(self, query: Query) -> Page | Stream:
        lines = query.get("lines")
        if lines is not None and not (lines.isdecimal() and int(lines) <= _MOST_LINES):
            return _refusal(f"lines={lines}: give a whole number up to {_MOST_LINES}")
        follow, count = query.get("follow", "0") == "1", int(lines) if lines is not None else None

        def texts(wait: Callable[[], bool]) -> Iterator[str]:
            return run_logs.stream(self._directory, count, wait if follow else None)

        return Stream(texts)

    def _stop(self, body: bytes) -> Page:
        try:
            request: Any = json.loads(body) if body.strip() else {}
        except ValueError as error:
            return _refusal(f'the body is not JSON ({error}): send {{"seconds": 60}}, or nothing')
        seconds: Any = request.get("seconds", _STOP_SECONDS) if isinstance(request, dict) else None
        if type(seconds) not in (int, float) or not 0 < seconds <= _MOST_STOP_SECONDS:
            most = f"{_MOST_STOP_SECONDS:.0f}"
            return _refusal(f'send {{"seconds": N}}, with N up to {most} for the last commit, or nothing for 60')
        self._orders.stop(float(seconds))
        return _json(HTTPStatus.OK, self._standing.as_json())

    def _start(self, _body: bytes) -> Page:
        self._orders.start()
        return _json(HTTPStatus.OK, self._standing.as_json())


def _json(status: HTTPStatus, content: Mapping[str, Any]) -> Page:
    return Page(status, "application/json", json.dumps(content) + "\n")


def _refusal(sentence: str) -> Page:
    return _json(HTTPStatus.BAD_REQUEST, {"message": sentence})
