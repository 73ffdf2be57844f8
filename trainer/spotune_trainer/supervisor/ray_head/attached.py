"""A Ray head that somebody else keeps running, known by the address of its Jobs API: KubeRay's, in a head pod."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError

_POLL_SECONDS = 0.5


class GivenRay:
    """As a `RayHead` it is always alive: while it restarts it is silent, and then it knows no attempt of before.

    Args:
        url: of the Jobs API.
        token: that it asks for.
        stopped: asked while waiting for an answer; true ends the wait.
    """

    def __init__(self, url: str, token: str, stopped: Callable[[], bool] = lambda: False) -> None:
        self._client = JobsClient(url, token)
        self._stopped = stopped

    def find(self, record: Mapping[str, Any] | None) -> bool:
        """False until it answers: what an earlier supervisor noted says nothing about now."""
        return self.answers()

    def start(self) -> None:
        """Wait until it answers, however long that takes."""
        while not self.answers() and not self._stopped():
            time.sleep(_POLL_SECONDS)

    def is_alive(self) -> bool:
        """True: whoever keeps it running starts it again."""
        return True

    def client(self) -> JobsClient:
        """A client of its Jobs API."""
        return self._client

    def record(self) -> dict[str, Any] | None:
        """Its address, for people."""
        return {"url": self._client.url}

    def end(self) -> None:
        """Nothing: it is not ours."""

    def answers(self) -> bool:
        """Whether it answers now."""
        try:
            self._client.version()
        except JobsUnavailableError:
            return False
        return True
