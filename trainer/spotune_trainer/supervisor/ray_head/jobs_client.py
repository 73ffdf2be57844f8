"""Ray's Jobs REST API, as much as a supervisor needs, with the standard library alone.

The submission id is chosen by the caller and Ray refuses one that it knows, so an attempt whose submission timed out
can be submitted again without ever running twice.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from spotune.errors import InfrastructureError

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_NOT_FOUND = 404


class JobsUnavailableError(InfrastructureError):
    """Ray's Jobs API does not answer, or not as it should."""


@dataclass(frozen=True)
class RayJob:
    """One submission.

    Attributes:
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        exit_code: of the entry point's process; negative where a signal ended it, None where it is not known.
        message: Ray's words on the status.
    """

    submission_id: str
    status: str
    exit_code: int | None
    message: str
    metadata: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in _ENDED


class JobsClient:
    """Speaks to the Jobs API of one Ray head; every call raises `JobsUnavailableError` where that does not answer."""

    def __init__(self, url: str, token: str, timeout_seconds: float = 30.0) -> None:
        self.url = url
        self._token = token
        self._timeout_seconds = timeout_seconds

    def version(self) -> str:
        """Ray's version: the smallest thing to ask for."""
        return str(self._call("GET", "/api/version")["ray_version"])

    def list_jobs(self) -> list[RayJob]:
        """All submissions that this head has seen."""
        return [_parse(record) for record in self._call("GET", "/api/jobs/") if record.get("submission_id")]

    def find(self, submission_id: str) -> RayJob | None:
        """One submission, or None where this head has not seen it."""
        record = self._call("GET", f"/api/jobs/{submission_id}", missing_is_none=True)
        return _parse(record) if record is not None else None

    def submit(self, entrypoint: str, submission_id: str, metadata: Mapping[str, str]) -> None:
        """Run a command on the head, once, however often this is called with the same id."""
        request = {"entrypoint": entrypoint, "submission_id": submission_id, "metadata": dict(metadata)}
        try:
            self._call("POST", "/api/jobs/", request)
        except JobsUnavailableError:
            if self.find(submission_id) is None:
                raise

    def stop(self, submission_id: str) -> None:
        """Ask Ray to end the command: SIGTERM, and SIGKILL a little later. Does not wait."""
        self._call("POST", f"/api/jobs/{submission_id}/stop", missing_is_none=True)

    def logs(self, submission_id: str) -> str:
        """What the command wrote so far; empty where this head has not seen it."""
        answer = self._call("GET", f"/api/jobs/{submission_id}/logs", missing_is_none=True)
        return str(answer["logs"]) if answer is not None else ""

    def _call(self, method: str, path: str, body: Any = None, *, missing_is_none: bool = False) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode() if body is not None else None,
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with _NO_PROXY.open(request, timeout=self._timeout_seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if missing_is_none and error.code == _NOT_FOUND:
                    return None
                text = error.read().decode(errors="replace").strip()[-500:]
            raise JobsUnavailableError(f"{method} {self.url}{path} failed with {error.code}: {text}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise JobsUnavailableError(f"{method} {self.url}{path} was not answered: {error}") from error


def _parse(record: Mapping[str, Any]) -> RayJob:
    return RayJob(
        submission_id=record["submission_id"],
        status=record["status"],
        exit_code=record.get("driver_exit_code"),
        message=record.get("message") or "",
        metadata=record.get("metadata") or {},
    )
