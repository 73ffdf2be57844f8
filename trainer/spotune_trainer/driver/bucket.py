"""What the driver reads from and writes to the bucket of its job. Does nothing if the job directory is the storage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.client import Bucket, BucketError, open_bucket
from spotune_trainer.bucket.folders import pull_generation_logs, push_folder
from spotune_trainer.bucket.link import link_of
from spotune_trainer.bucket.writer import push_file
from spotune_trainer.data.manifests import MANIFEST
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.driver")

T = TypeVar("T")

_RETRY_SECONDS: Final = 5.0


class DriverBucket:
    """The driver's requests. While the bucket cannot be reached, they are repeated.

    Args:
        directory: of the job.
        while_waiting: called with a message before each pause; what it raises ends the wait.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self, directory: JobDirectory, while_waiting: Callable[[str], None], sleep: Callable[[float], None]
    ) -> None:
        self._directory = directory
        self._link = link_of(directory)
        self._while_waiting = while_waiting
        self._sleep = sleep

    def when_reachable(self, request: Callable[[], T]) -> T:
        """The result of a request, which is repeated until the bucket can be reached."""
        while True:
            try:
                return request()
            except BucketError as error:
                logger.warning("%s; trying again", error)
                self._while_waiting(f"{error}; trying again")
                self._sleep(_RETRY_SECONDS)

    def refresh(self) -> None:
        """Learn of all generations, what they logged and committed, before a checkpoint is chosen.

        Ranks of an earlier driver may have trained on after the start of this one.
        """
        if self._link is not None:
            bucket = open_bucket(self._link.url)
            self.when_reachable(lambda: _refresh(bucket, self._directory))

    def upload_data(self) -> None:
        """Upload shards that were made from raw data. After the first commit no run makes them again."""
        if self._link is not None:
            bucket = open_bucket(self._link.url)
            self.when_reachable(lambda: _push_data(bucket, self._directory))

    def upload_plan(self) -> None:
        """Upload the plan before a generation is claimed: its commits have to be continued with the same plan."""
        link = link_of(self._directory)  # a supervisor that started after this driver has another number
        if link is not None:
            bucket = open_bucket(link.url)
            self.when_reachable(lambda: push_file(bucket, self._directory, link, self._directory.plan))


def _refresh(bucket: Bucket, directory: JobDirectory) -> None:
    refresh(bucket, directory)
    pull_generation_logs(bucket, directory)


def _push_data(bucket: Bucket, directory: JobDirectory) -> None:
    """Upload shards. Those in the bucket are deleted first if they were made from other data, or in another way."""
    for manifest in directory.data.rglob(MANIFEST):
        name = str(manifest.relative_to(directory.root))
        if bucket.read(name) not in (None, manifest.read_bytes()):
            bucket.delete(bucket.list(name.rpartition("/")[0]))
    push_folder(bucket, directory, directory.data, last=MANIFEST)
