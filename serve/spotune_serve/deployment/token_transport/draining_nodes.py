"""Which Ray nodes are about to leave."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Final

from ray._private.worker import global_worker

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0


class DrainingNodes:
    """Ids of the draining nodes of the Ray cluster. A thread asks Ray's head for them, as long as the process runs.

    So no request waits for the head. While the head does not answer, its last answer holds.

    Args:
        ask: returns the ids of the nodes; it may block or raise.
        period_seconds: from an answer to the next question.
    """

    def __init__(self, ask: Callable[[], Collection[str]], period_seconds: float = _PERIOD_SECONDS) -> None:
        self._ask = ask
        self._period_seconds = period_seconds
        self._nodes: frozenset[str] = frozenset()
        threading.Thread(target=self._keep_asking, name="draining-nodes", daemon=True).start()

    def __call__(self) -> frozenset[str]:
        """The last answer; empty before the first one."""
        return self._nodes

    def _keep_asking(self) -> None:
        answered = True
        while True:
            try:
                self._nodes = frozenset(self._ask())
                answered = True
            except Exception as error:  # of Ray, whose head may be lost; requests do not need it  # noqa: BLE001
                if answered:
                    logger.warning("Ray's head does not tell which nodes are draining: %s", error)
                answered = False
            time.sleep(self._period_seconds)


@cache
def watch_draining_nodes() -> DrainingNodes:
    """The draining nodes of the cluster of this process, watched by one thread from the first call on."""
    return DrainingNodes(_ask_head)


def _ask_head() -> Collection[str]:
    """The answer of Ray's head. Ray has no public API for it; Ray Serve's controller asks in the same way."""
    worker: Any = global_worker
    nodes: dict[str, int] = worker.gcs_client.get_draining_nodes(timeout=_ANSWER_SECONDS)
    return nodes.keys()
