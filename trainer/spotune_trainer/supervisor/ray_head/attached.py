"""A Ray head that KubeRay keeps running in the head pod, reached by the address of its Jobs API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError

_POLL_SECONDS = 0.5


class AttachedRay:
    """A `RayHead` that this supervisor neither starts nor ends.

    It counts as alive at all times. While the head restarts it does not respond, and afterwards it has no record of
    earlier attempts.

    Args:
        url: of the Jobs API.
        token: bearer token of the Jobs API.
        stopped: polled while `start` waits; true ends the wait.
    """

    def __init__(self, url: str, token: str, stopped: Callable[[], bool] = lambda: False) -> None:
        self._client = JobsClient(url, token)
        self._stopped = stopped

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        """Whether the head responds now; the address is fixed, so the record is ignored."""
        return self.is_responding()

    def start(self) -> None:
        """Wait without a time limit until the head responds."""
        while not self.is_responding() and not self._stopped():
            time.sleep(_POLL_SECONDS)

    def is_alive(self) -> bool:
        """Always true: KubeRay restarts the head."""
        return True

    def is_responding(self) -> bool:
        """Whether the Jobs API answers now."""
        try:
            self._client.version()
        except JobsUnavailableError:
            return False
        return True

    def client(self) -> JobsClient:
        """A client of the Jobs API."""
        return self._client

    def record(self) -> dict[str, Any] | None:
        """The address, for people who read `supervisor.json`."""
        return {"url": self._client.url}

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        """Do nothing: the head belongs to KubeRay."""
