"""Uploads what one rank logs in its generation: its log, and from rank 0 the steps, the events and the progress.

Each file has one process that uploads it, and its folder has the number of the generation. So nothing else fences it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from spotune_trainer.bucket.appended import AppendedFile
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory

logger = logging.getLogger("spotune.worker")

PUSH_SECONDS: Final = 5.0
_LAST_PUSH_ATTEMPTS: Final = 3


class GenerationLogUpload:
    """Uploads files of a rank every few seconds, and at exit; a context manager.

    Args:
        bucket: the bucket.
        directory: of the job.
        steps: the file that `push_steps` uploads.
        appended: files that grow, to upload every few seconds.
        replaced: other files, to upload every few seconds.
    """

    def __init__(
        self,
        bucket: Bucket,
        directory: JobDirectory,
        steps: Path,
        appended: Iterable[Path],
        replaced: Iterable[Path] = (),
    ) -> None:
        self._bucket = bucket
        self._root = directory.root
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._steps = self._appended(steps)
        self._appended_files = [self._steps if path == steps else self._appended(path) for path in appended]
        self._replaced = tuple(replaced)
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="log-upload", daemon=True)

    @classmethod
    def of_rank(cls, bucket: Bucket, directory: JobDirectory, logs: GenerationLogs, rank: int) -> Self:
        """For a rank whose process writes all of its files."""
        of_rank_0 = (logs.steps, logs.events) if rank == 0 else ()
        return cls(bucket, directory, logs.steps, (logs.worker(rank), *of_rank_0), _replaced_files(logs, rank))

    @classmethod
    def of_command(cls, bucket: Bucket, directory: JobDirectory, logs: GenerationLogs, rank: int) -> Self:
        """For a rank that runs a command. While that runs, a process of it uploads the steps: see `of_program`."""
        of_rank_0 = (logs.events,) if rank == 0 else ()
        return cls(bucket, directory, logs.steps, (logs.worker(rank), *of_rank_0), _replaced_files(logs, rank))

    @classmethod
    def of_program(cls, bucket: Bucket, directory: JobDirectory, logs: GenerationLogs, rank: int) -> Self:
        """For a process of a command that has joined as a rank: the steps alone, which a commit needs in the bucket."""
        return cls(bucket, directory, logs.steps, (logs.steps,) if rank == 0 else ())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def push_steps(self) -> None:
        """Upload the steps that are in the file now.

        Raises:
            BucketError: the bucket does not accept them.
        """
        with self._lock:
            self._steps.push()

    def push(self) -> None:
        """Upload everything that the files have now.

        Raises:
            BucketError: the bucket does not accept it; a later call continues.
        """
        with self._lock:
            for log in self._appended_files:
                log.push()
            for path in self._replaced:
                self._push_replaced(path)

    def _push_replaced(self, path: Path) -> None:
        try:
            found = path.stat()
            version = found.st_mtime_ns, found.st_size
            if found.st_size and self._uploaded.get(path) != version:
                self._bucket.write(self._name(path), path.read_bytes())
                self._uploaded[path] = version
        except FileNotFoundError:
            return

    def _run(self) -> None:
        attempts_left = _LAST_PUSH_ATTEMPTS
        while attempts_left:
            is_closing = self._closing.wait(PUSH_SECONDS)
            try:
                self.push()
            except OSError as error:  # of the bucket, or of a local file
                logger.warning("the logs of this rank are not uploaded yet: %s", error)
                attempts_left -= is_closing
            else:
                if is_closing:
                    return

    def _appended(self, path: Path) -> AppendedFile:
        return AppendedFile(self._bucket, self._name(path), path)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _replaced_files(logs: GenerationLogs, rank: int) -> tuple[Path, ...]:
    of_rank_0 = (logs.progress,) if rank == 0 else ()
    return logs.failure(rank), logs.stacks(rank), *of_rank_0
