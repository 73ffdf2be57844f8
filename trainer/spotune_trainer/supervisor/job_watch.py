"""Watches the job file of a pod: a mounted ConfigMap that can change at any time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from spotune.errors import SpotuneError
from spotune.fingerprint import changed_fields
from spotune.job import FinetuneJob
from spotune_trainer.job_directory.job import job_of, put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.control import SupervisorStatus
from spotune_trainer.supervisor.preflight.admission import resolve_job

_POLL_SECONDS = 2.0


class JobFile:
    """The job of a file, read again when the file changes.

    Args:
        path: of the file.
        directory: of the job; accepted changes are written to its `job.json`.
        status: `job` and `job_file_problem` are set to which content is in use.
        log: writes a line for people.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: Path,
        directory: JobDirectory,
        status: SupervisorStatus,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._directory = directory
        self._status = status
        self._log = log
        self._clock = clock
        self._last_poll = float("-inf")
        self._observed = ""
        self._job: FinetuneJob | None = None

    def read(self) -> FinetuneJob:
        """Read the file again, without comparing it with an earlier content or writing `job.json`.

        Raises:
            UsageError: the file does not exist.
            JobError: the job is invalid.
        """
        digest = self._digest()
        self._observed = self._status.job = digest  # also for an invalid job: its error is about this content
        self._status.job_file_problem = ""
        self._job, _ = resolve_job(self._path, {})
        return self._job

    def current(self) -> FinetuneJob:
        """The job with the newest acceptable changes, which are also written to `job.json`.

        A file that is invalid, or that changes what is trained, is reported once and otherwise ignored.
        """
        assert self._job is not None, "read first"
        digest = self._digest() if self._is_poll_due() else self._observed
        if digest == self._observed:
            return self._job
        try:
            job, _ = resolve_job(self._path, {})
        except SpotuneError as error:
            self._refuse(digest, f"the changed job file is not used: {error}")
            return self._job
        if changed := changed_fields(self._job, job):
            names = ", ".join(changed)
            self._refuse(digest, f"the changed job file is not used: {names} changed, which would train something else")
            return self._job
        if self._directory.job.exists():
            put_changed_job(self._directory, job)
        self._job = job
        self._observed = self._status.job = digest
        self._status.job_file_problem = ""
        return self._job

    def has_changed(self) -> bool:
        """Whether the file has changed since it was last read."""
        return self._is_poll_due() and self._digest() != self._observed

    def _refuse(self, digest: str, reason: str) -> None:
        """Ignore this content of the file from now on, and report why."""
        self._observed = digest
        self._status.job_file_problem = reason
        self._log(reason)

    def _is_poll_due(self) -> bool:
        if self._clock() - self._last_poll < _POLL_SECONDS:
            return False
        self._last_poll = self._clock()
        return True

    def _digest(self) -> str:
        """SHA-256 of the file's bytes; the last one while the file is missing, as during an update by the kubelet."""
        try:
            return hashlib.sha256(self._path.read_bytes()).hexdigest()
        except FileNotFoundError:
            return self._observed


def put_changed_job(directory: JobDirectory, job: FinetuneJob) -> None:
    """Put a job in a directory as `put_job` does, and record in the ledger which sections of its spec changed."""
    earlier = job_of(directory)
    fields = _changed_sections(earlier, job) if earlier is not None else []
    if earlier is None or fields:
        put_job(directory, job)
    if fields:
        Ledger(directory).append("job-changed", fields=fields)


def _changed_sections(old: FinetuneJob, new: FinetuneJob) -> list[str]:
    """CamelCase paths of the sections of `spec` that differ between two jobs."""
    before, after = (job.spec.model_dump(mode="json", by_alias=True) for job in (old, new))
    return [f"spec.{name}" for name in after if before[name] != after[name]]
