"""A job file that may change at any time: a mounted ConfigMap, looked at every few seconds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from spotune.errors import SpotuneError
from spotune.fingerprint import changed_fields
from spotune.job import FinetuneJob
from spotune_trainer.job_directory.job import job_of, put_job, resolve_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.control import Standing

_LOOK_EVERY_SECONDS = 2.0


class JobFile:
    """The job of a file, read again when that changes.

    Args:
        path: of the file.
        directory: of the job; what changes is put into its `job.json`.
        standing: told which content of the file is worked by.
        say: tells a person.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: Path,
        directory: JobDirectory,
        standing: Standing,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._directory = directory
        self._standing = standing
        self._say = say
        self._clock = clock
        self._looked = float("-inf")
        self._seen = ""
        self._job: FinetuneJob | None = None

    def read(self) -> FinetuneJob:
        """The job as it is now, whatever it was before; not yet put into the directory.

        Raises:
            UsageError: there is no such file.
            JobError: it cannot be run.
        """
        digest = self._digest()
        self._seen = self._standing.job = digest  # a job that is refused is worked by, too: it is what failed
        self._standing.remark = ""
        self._job, _ = resolve_job(self._path, {})
        return self._job

    def current(self) -> FinetuneJob:
        """The job as it is by now: changes of how it is run are taken in, and put into the directory.

        What is wrong, or trains something else, is not taken in: it is said once, and the job stays as it was.
        """
        assert self._job is not None, "read first"
        digest = self._digest() if self._is_time_to_look() else self._seen
        if digest == self._seen:
            return self._job
        try:
            job, _ = resolve_job(self._path, {})
        except SpotuneError as error:
            self._refuse(digest, f"the job file cannot be used as it is now: {error}")
            return self._job
        if changed := changed_fields(self._job, job):
            self._refuse(digest, f"{', '.join(changed)} changed in the job file: what is trained stays as it was begun")
            return self._job
        if self._directory.job.exists():
            put_changed_job(self._directory, job)
        self._job = job
        self._seen = self._standing.job = digest
        self._standing.remark = ""
        return self._job

    def has_changed(self) -> bool:
        """Whether the file has changed since it was last read."""
        return self._is_time_to_look() and self._digest() != self._seen

    def _refuse(self, digest: str, reason: str) -> None:
        self._seen = digest
        self._standing.remark = reason
        self._say(reason)

    def _is_time_to_look(self) -> bool:
        if self._clock() - self._looked < _LOOK_EVERY_SECONDS:
            return False
        self._looked = self._clock()
        return True

    def _digest(self) -> str:
        """SHA-256 of its bytes; of none where it is not there, as while the kubelet changes it."""
        try:
            return hashlib.sha256(self._path.read_bytes()).hexdigest()
        except FileNotFoundError:
            return self._seen


def put_changed_job(directory: JobDirectory, job: FinetuneJob) -> None:
    """Put a job in a directory, as `put_job` does, and record which sections of the one before it changes."""
    earlier = job_of(directory)
    fields = _changed_sections(earlier, job) if earlier is not None else []
    if earlier is None or fields:
        put_job(directory, job)
    if fields:
        Ledger(directory).append("job-changed", fields=fields)


def _changed_sections(old: FinetuneJob, new: FinetuneJob) -> list[str]:
    """CamelCase paths of the sections of `spec` that differ."""
    before, after = (job.spec.model_dump(mode="json", by_alias=True) for job in (old, new))
    return [f"spec.{name}" for name in after if before[name] != after[name]]
