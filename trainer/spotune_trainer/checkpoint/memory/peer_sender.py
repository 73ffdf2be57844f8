"""Sends the files of each complete commit from one node's memory to the next node of a ring, in the background.

A file is sent only once its commit is complete. From then on no worker group starts from the commit before, so the
other node may overwrite that copy, and needs room for one only. With a limit on bytes per second and the lowest
priority, a thread leaves network and processor to the training steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from spotune_trainer.checkpoint.memory.node_memory import NodeMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress, PeerConnection, PeerError, asking
from spotune_trainer.checkpoint.memory.peer_server import lower_priority
from spotune_trainer.checkpoint.memory.segment import Label, Segment

logger = logging.getLogger("spotune.worker")

_POLL_SECONDS = 0.25
_RETRY_SECONDS = 5.0
_CONNECT_SECONDS = 10.0


class PeerSender:
    """The thread that sends, for one worker group.

    Args:
        memory: the segments of this node's ranks.
        generation: of the worker group.
        newest_complete: returns which of these checkpoints of the generation is the newest that is complete, if any is.
        peer: the next node of the ring.
        secret: that all agents of a driver have.
        bytes_per_second: limit.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        memory: NodeMemory,
        generation: int,
        newest_complete: Callable[[Collection[str]], str | None],
        peer: PeerAddress,
        secret: bytes,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._generation = generation
        self._newest_complete = newest_complete
        self._peer = peer
        self._secret = secret
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._stopped = threading.Event()
        self._sent: str | None = None
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="peer sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting. A copy that is under way stays incomplete, and the other node drops it."""
        self._stopped.set()

    def _run(self) -> None:
        lower_priority()
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                self.send_newest()
            except (PeerError, OSError) as error:
                self._report(f"{error}")
                self._stopped.wait(_RETRY_SECONDS)

    def send_newest(self) -> bool:
        """Send the newest complete commit, if it is not sent yet. Returns whether it was sent.

        Raises:
            PeerError: the other node did not get all of its files.
            OSError: the volume does not show which commits are complete.
        """
        held: dict[str, dict[Label, Segment]] = {}
        for label, segment in self._memory.labelled():
            held.setdefault(label.checkpoint, {})[label] = segment
        written = [name for name, files in held.items() if len(files) == self._memory.ranks]
        unsent = any(name != self._sent for name in written)
        name = self._newest_complete(written) if unsent else None
        if name is None or name == self._sent:  # with two segments, the commit before the last one is here, too
            return False
        started = self._clock()
        self._send(held[name])
        size = sum(label.size for label in held[name])
        logger.info("%s: %d bytes are copied to node %s", name, size, self._peer)
        logger.debug("the copy took %.1f s", self._clock() - started)
        self._sent, self._problem = name, None
        return True

    def _send(self, files: dict[Label, Segment]) -> None:
        names = [label.file for label in files]
        started, sent = self._clock(), 0

        def wait(count: int) -> None:
            due = started + (sent + count) / self._bytes_per_second
            if self._stopped.wait(max(0.0, due - self._clock())):
                raise PeerError("the worker group has ended")

        with PeerConnection.open(self._peer, self._secret, _CONNECT_SECONDS) as connection:
            for label, segment in files.items():
                connection.send(asking("keep", label, generation=self._generation, files=names))
                _raise_if_refused(connection)
                connection.send_content(segment, label, before_chunk=wait)
                _raise_if_refused(connection)
                sent += label.size

    def _report(self, problem: str) -> None:
        """Log a problem once, until a commit is sent again."""
        if problem != self._problem and not self._stopped.is_set():
            self._problem = problem
            logger.warning(
                "the last commit is not copied to node %s: %s. "
                "The next worker group reads its files from the volume if this node is lost",
                self._peer,
                problem,
            )


def _raise_if_refused(connection: PeerConnection) -> None:
    reason = connection.receive()["refused"]
    if reason is not None:
        raise PeerError(f"it refuses the copy, because {reason}")
