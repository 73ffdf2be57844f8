"""Client of Ray's Jobs REST API, limited to what a supervisor needs; standard library only.

The caller chooses the submission id, and Ray refuses an id that it already has. So an attempt whose submission timed
out can be submitted again without running twice.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from spotune.errors import InfrastructureError

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_NOT_FOUND = 404


class JobsUnavailableError(InfrastructureError):
    """Ray's Jobs API does not answer, or answers with an error."""


@dataclass(frozen=True)
class RayJob:
    """One submission in Ray.

    Attributes:
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        exit_code: of the entry point's process; negative after a signal, None where Ray does not report it.
        message: Ray's explanation of the status.
    """

    submission_id: str
    status: str
    exit_code: int | None
    message: str
    metadata: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """Whether the submission has reached a final status."""
        return self.status in _ENDED


class JobsClient:
    """Calls the Jobs API of one Ray head; every call raises `JobsUnavailableError` where the API does not answer."""

    def __init__(self, url: str, token: str, timeout_seconds: float = 30.0) -> None:
        self.url = url
        self._token = token
        self._timeout_seconds = timeout_seconds

    def version(self) -> str:
        """Ray's version; the cheapest call, for testing whether the API answers."""
        with self._reading("/api/version"):
            return str(self._call("GET", "/api/version")["ray_version"])

    def list_jobs(self) -> list[RayJob]:
        """All submissions that this head has a record of."""
        with self._reading("/api/jobs/"):
            return [_parse(record) for record in self._call("GET", "/api/jobs/") if record.get("submission_id")]

    def find(self, submission_id: str) -> RayJob | None:
        """One submission, or None where this head has no record of it."""
        path = f"/api/jobs/{submission_id}"
        with self._reading(path):
            record = self._call("GET", path, missing_is_none=True)
            return _parse(record) if record is not None else None

    def submit(self, entrypoint: str, submission_id: str, metadata: Mapping[str, str]) -> None:
        """Run a command on the head; repeated calls with the same id run it once."""
        request = {"entrypoint": entrypoint, "submission_id": submission_id, "metadata": dict(metadata)}
        try:
            self._call("POST", "/api/jobs/", request)
        except JobsUnavailableError:
            if self.find(submission_id) is None:
                raise

    def stop(self, submission_id: str) -> None:
        """Ask Ray to stop the command with SIGTERM and, if needed, SIGKILL. Returns without waiting."""
        self._call("POST", f"/api/jobs/{submission_id}/stop", missing_is_none=True)

    def logs(self, submission_id: str) -> str:
        """Output of the command so far; empty where this head has no record of it."""
        path = f"/api/jobs/{submission_id}/logs"
        with self._reading(path):
            response = self._call("GET", path, missing_is_none=True)
            return str(response["logs"]) if response is not None else ""

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Turn what an answer of another program raises into a JobsUnavailableError."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise JobsUnavailableError(f"{self.url}{path} gave an answer that is not of Ray ({what})") from error

    def _call(self, method: str, path: str, body: Any = None, *, missing_is_none: bool = False) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode() if body is not None else None,
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with _NO_PROXY.open(request, timeout=self._timeout_seconds) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if missing_is_none and error.code == _NOT_FOUND:
                    return None
                text = error.read().decode(errors="replace").strip()[-500:]
            raise JobsUnavailableError(f"{method} {self.url}{path} failed with {error.code}: {text}") from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise JobsUnavailableError(f"{method} {self.url}{path} was not answered: {error}") from error


def _parse(record: Mapping[str, Any]) -> RayJob:
    return RayJob(
        submission_id=str(record["submission_id"]),
        status=str(record["status"]),
        exit_code=record.get("driver_exit_code"),
        message=record.get("message") or "",
        metadata=record.get("metadata") or {},
    )
