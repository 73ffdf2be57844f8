"""Commits while training goes on: the loop waits for a copy in host memory, a thread of every rank does the rest.

At most one commit is in flight. A volume that fails is tried again, for ever: training goes on meanwhile, and
``problem`` says what is wrong. What a kill leaves is a folder without a manifest, which is no checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from spotune.job import CheckpointSpec
from spotune_trainer.checkpoint.fragment import HeldFragment
from spotune_trainer.checkpoint.generations import refuse_superseded
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest
from spotune_trainer.checkpoint.snapshot import Snapshot
from spotune_trainer.checkpoint.writer import arrived_so_far, commit, prune, write_fragments
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.worker")

T = TypeVar("T")

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0
_SLOW_SECONDS = 120.0
"""A commit that takes longer is said to be slow."""
_LOOK_SECONDS = 1.0
"""From one look at what has arrived on the volume to the next."""


@dataclass(frozen=True)
class Committed:
    """What a commit was.

    Attributes:
        name: of the checkpoint.
        manifest: as it was written; None on all ranks but 0, of which each knows its own file alone.
        stall_seconds: that the training loop waited for it.
        seconds: from its beginning until it was durable.
    """

    name: CheckpointName
    manifest: Manifest | None
    stall_seconds: float
    seconds: float


@dataclass
class _Flight:
    """A commit that is under way."""

    name: CheckpointName
    started: float
    stall_seconds: float = 0.0
    seconds: float = 0.0
    manifest: Manifest | None = None
    error: BaseException | None = None
    problem: str | None = None
    refusals: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class Committer:
    """Commits what one rank holds; all ranks of a generation begin the same commits in the same order.

    Args:
        directory: the job's folder.
        rank: of this process; rank 0 writes the manifests, once all ranks have written.
        world_size: number of ranks.
        checkpoint: how many checkpoints are kept.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        directory: JobDirectory,
        rank: int,
        world_size: int,
        checkpoint: CheckpointSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._checkpoint = checkpoint
        self._clock = clock
        self._snapshot = Snapshot()
        self._reserving: threading.Thread | None = None
        self._flight: _Flight | None = None
        self._arrived: object = None
        self._looked = float("-inf")

    @property
    def is_busy(self) -> bool:
        """Whether a commit is in flight."""
        return self._flight is not None and not self._flight.done.is_set()

    @property
    def problem(self) -> str | None:
        """What keeps the commit that is in flight from its end, for people; None where nothing does."""
        flight = self._flight
        if flight is None or flight.done.is_set():
            return None
        minutes = int((self._clock() - flight.started) / 60)
        if flight.problem is None and minutes * 60 >= _SLOW_SECONDS:
            return f"the commit of step {flight.name.step} has been under way for {minutes} min"
        return flight.problem

    def advances(self) -> bool:
        """Whether the commit in flight has come further since the last look; once a second it is worth one.

        On rank 0 whatever any rank writes counts, elsewhere what this one does; a refusal of the volume does, too: it
        will be asked again.
        """
        flight, now = self._flight, self._clock()
        if flight is None or now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        before = self._arrived
        arrived = arrived_so_far(self._directory.checkpoints / str(flight.name), self._rank)
        self._arrived = (flight.name, flight.refusals, arrived)
        return self._arrived != before

    def reserve(self, fragments: Sequence[HeldFragment]) -> None:
        """Take the host memory in the background, before the first commit needs it."""
        self._reserving = threading.Thread(target=self._snapshot.reserve, args=(fragments,), daemon=True)
        self._reserving.start()

    def begin(
        self,
        name: CheckpointName,
        fragments: Sequence[HeldFragment],
        manifest: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> None:
        """Begin to commit the fragments as they are now; the one before must have been taken in.

        Args:
            name: of the checkpoint.
            fragments: what this rank owns.
            manifest: makes the manifest of all ranks' files; called on rank 0, in a thread.
        """
        assert self._flight is None, "one commit at a time"
        flight = _Flight(name, self._clock())
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        self._snapshot.take(fragments)
        self._flight = flight
        threading.Thread(target=self._run, args=(flight, manifest), name="commit", daemon=True).start()
        flight.stall_seconds = self._clock() - flight.started

    def protect(self) -> None:
        """To be called before an optimizer step: it must not change what is still being copied."""
        self._snapshot.protect()

    def poll(self) -> Committed | None:
        """The commit that has ended since the last call, if one has.

        Raises:
            SupersededError: a later generation has started; it was not committed.
        """
        flight = self._flight
        if flight is None or not flight.done.is_set():
            return None
        self._flight = None
        if flight.error is not None:
            raise flight.error
        return Committed(flight.name, flight.manifest, flight.stall_seconds, flight.seconds)

    def wait(self, waiting: Callable[[], None] = lambda: None) -> Committed | None:
        """Wait for the commit in flight, if there is one; raises as ``poll`` does.

        Args:
            waiting: called every now and then meanwhile.
        """
        while self._flight is not None and not self._flight.done.wait(0.2):
            waiting()
        return self.poll()

    def _run(self, flight: _Flight, manifest: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        try:
            folder = self._directory.checkpoints / str(flight.name)
            fragments = self._snapshot.fragments()
            self._insist(flight, lambda: write_fragments(folder, self._rank, fragments))
            if self._rank == 0:
                refuse_superseded(self._directory, flight.name.generation)
                flight.manifest = self._insist(
                    flight, lambda: commit(self._directory, flight.name, self._world_size, manifest)
                )
                keep = self._checkpoint
                self._insist(
                    flight, lambda: prune(self._directory, flight.name.generation, keep.keep, keep.keep_every_steps)
                )
        except BaseException as error:  # noqa: BLE001 - raised by whoever polls
            flight.error = error
        finally:
            flight.seconds = self._clock() - flight.started
            flight.done.set()

    def _insist(self, flight: _Flight, write: Callable[[], T]) -> T:
        """Try again until the volume takes it."""
        seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                found = write()
            except OSError as error:
                flight.refusals += 1
                flight.problem = f"the commit of step {flight.name.step} fails, and is tried again: {error}"
                logger.warning("%s", flight.problem)
                time.sleep(seconds)
                seconds = min(2 * seconds, _LAST_RETRY_SECONDS)
            else:
                flight.problem = None
                return found
