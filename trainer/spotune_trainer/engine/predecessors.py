"""Processes of the last generation that still end while the ranks of the next one start.

The kernel needs a second to free the page-locked memory and the GPU memory of a killed process. From the moment of its
death the process runs no code of its own. So the next generation starts at once, and waits at two places:

* before it allocates the model, if the GPU might have too little memory for both. On a CPU, always;
* before its first commit. A copy from the GPU that was under way may still reach the shared memory of the node until
  the process has ended. It does not reach the complete commit that the next generation restores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from spotune.errors import InfrastructureError
from spotune_trainer.engine.process_state import has_ended

logger = logging.getLogger("spotune.worker")

LONGEST_SECONDS = 60.0
"""A killed process ends within this time, even if it has to free much memory."""

_POLL_SECONDS = 0.01
_ROOM = 2
"""A worker group of half as many workers has states of twice the size."""


class Predecessors:
    """Waits for these processes.

    Args:
        pids: of processes of this node, which have been killed or have exited.
        longest_seconds: how long they may need.
    """

    def __init__(self, pids: Collection[int] = (), longest_seconds: float = LONGEST_SECONDS) -> None:
        self._pids = tuple(pids)
        self._longest_seconds = longest_seconds

    def wait_for_room(self) -> None:
        """Wait until they have ended, unless the GPU of this rank has enough memory for another model beside theirs.

        Raises:
            InfrastructureError: they do not end.
        """
        if self._pids and not _gpu_has_room():
            self.wait()

    def wait(self) -> None:
        """Wait until they have ended.

        Raises:
            InfrastructureError: they do not end.
        """
        if not self._pids:
            return
        began = time.monotonic()
        while left := [pid for pid in self._pids if not has_ended(pid)]:
            if time.monotonic() > began + self._longest_seconds:
                raise InfrastructureError(
                    f"process {left[0]} of the last worker group was killed {self._longest_seconds:g} s ago and does "
                    "not end: is its volume or GPU stuck?"
                )
            time.sleep(_POLL_SECONDS)
        logger.info("waited %.2f s for the last worker group's processes to end", time.monotonic() - began)
        self._pids = ()


def _gpu_has_room() -> bool:
    """Whether the GPU has `_ROOM` times as much free memory as it has in use. False without a GPU."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free >= _ROOM * (total - free)
