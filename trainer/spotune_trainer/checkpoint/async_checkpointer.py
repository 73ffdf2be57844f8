"""Asynchronous checkpointing: training waits for staging only; a thread of each rank writes and commits.

At most one commit is pending. If the volume fails, the thread retries for ever while training continues, and
`problem` holds the reason. A process that is killed leaves a folder without a manifest, which is not a checkpoint.

If the storage is a bucket, the file is written to this machine first, and the same thread uploads it. A bucket that
cannot be reached is treated as a volume that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spotune.job import BestSpec, CheckpointSpec
from spotune_trainer.bucket.checkpoints import upload_rank_file, wait_for_manifest
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.fragment import FragmentSource
from spotune_trainer.checkpoint.generations import raise_if_superseded
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest, rank_file, rank_ok
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.snapshot import Snapshot
from spotune_trainer.checkpoint.writer import commit, drop_older_copies, prune, write_fragments, write_progress
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.worker")

T = TypeVar("T")

_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0
_SLOW_SECONDS = 120.0
"""After this time, a pending commit is reported as a problem."""
_ABANDON_SECONDS = 1.0
"""How long an abandoned commit may take to end."""
_PROGRESS_CHECK_SECONDS = 1.0
"""Shortest time between two checks of the files on the volume."""


@dataclass(frozen=True)
class CommitResult:
    """A finished commit.

    Attributes:
        name: of the checkpoint.
        manifest: as written by rank 0; None on the other ranks.
        stall_seconds: how long `save` blocked the training loop.
        seconds: from the start of `save` until the commit was durable.
    """

    name: CheckpointName
    manifest: Manifest | None
    stall_seconds: float
    seconds: float

    def as_event(self) -> dict[str, Any]:
        """Values of rank 0's `committed` event."""
        assert self.manifest is not None, "rank 0 has written it"
        return {
            "step": self.name.step,
            "checkpoint": str(self.name),
            "seconds": round(self.seconds, 3),
            "stallSeconds": round(self.stall_seconds, 4),
            "bytes": sum(entry.size for entry in self.manifest.files),
        }


@dataclass
class _PendingSave:
    """A commit that its thread has not finished yet."""

    name: CheckpointName
    started: float
    stall_seconds: float = 0.0
    seconds: float = 0.0
    manifest: Manifest | None = None
    error: BaseException | None = None
    problem: str | None = None
    retries: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class _AbandonedError(Exception):
    """Nobody waits for the commit any more."""


class AsyncCheckpointer:
    """Saves the fragments of one rank. All ranks of a generation must save the same checkpoints in the same order.

    Args:
        directory: the job's folder.
        rank: of this process; rank 0 also writes the manifest, after all ranks have written.
        world_size: number of ranks.
        checkpoint: how many checkpoints to keep.
        best: which evaluation is the best, whose checkpoint is kept as well; None: none is.
        memory: shared memory that keeps the snapshots of commits for the next worker group; None: nothing does.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        directory: JobDirectory,
        rank: int,
        world_size: int,
        checkpoint: CheckpointSpec,
        best: BestSpec | None = None,
        memory: RankMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._bucket = bucket_of(directory)
        self._bucket_progress = 0
        self._rank = rank
        self._world_size = world_size
        self._checkpoint = checkpoint
        self._best = best
        self._clock = clock
        self._snapshot = Snapshot(memory)
        self._reservation: threading.Thread | None = None
        self._pending: _PendingSave | None = None
        self._abandoned = threading.Event()
        self._last_progress: object = None
        self._last_check = float("-inf")

    @property
    def is_busy(self) -> bool:
        """Whether a commit is pending."""
        return self._pending is not None and not self._pending.done.is_set()

    @property
    def problem(self) -> str | None:
        """Why the pending commit is not finished yet, as a message for users; None if nothing is wrong."""
        pending = self._pending
        if pending is None or pending.done.is_set():
            return None
        minutes = int((self._clock() - pending.started) / 60)
        if pending.problem is None and minutes * 60 >= _SLOW_SECONDS:
            return f"the commit of step {pending.name.step} has been running for {minutes} min"
        return pending.problem

    def has_progressed(self) -> bool:
        """Whether the pending commit has progressed since the last check. Checks at most once a second.

        On rank 0 a write of any rank counts, on the other ranks only their own. A failed attempt counts as well: the
        volume responds, and the attempt is repeated.
        """
        pending, now = self._pending, self._clock()
        if pending is None or now - self._last_check < _PROGRESS_CHECK_SECONDS:
            return False
        self._last_check = now
        written = write_progress(self._directory.checkpoints / str(pending.name), self._rank)
        progress = (pending.name, pending.retries, self._bucket_progress, written)
        previous, self._last_progress = self._last_progress, progress
        return self._last_progress != previous

    def reserve(self, fragments: Sequence[FragmentSource]) -> None:
        """Allocate the host memory in the background, before the first `save` needs it."""
        self._reservation = threading.Thread(target=self._snapshot.reserve, args=(fragments,), daemon=True)
        self._reservation.start()

    def save(
        self,
        name: CheckpointName,
        fragments: Sequence[FragmentSource],
        make_manifest: Callable[[tuple[FileEntry, ...]], Manifest],
    ) -> None:
        """Stage the fragments as they are now, and commit them in the background.

        The result of the previous commit must have been collected, with `poll` or `wait`.

        Args:
            name: of the checkpoint.
            fragments: the fragments that this rank owns.
            make_manifest: makes the manifest from the entries of all ranks' files; called on rank 0, in the thread.
        """
        assert self._pending is None, "one commit at a time"
        pending = _PendingSave(name, self._clock())
        if self._reservation is not None:
            self._reservation.join()
            self._reservation = None
        self._snapshot.take(fragments)
        self._pending = pending
        self._reservation = threading.Thread(
            target=self._run, args=(pending, make_manifest), name="commit", daemon=True
        )
        self._reservation.start()
        pending.stall_seconds = self._clock() - pending.started

    def wait_for_staging(self) -> None:
        """Call this before each optimizer step, which must not change tensors that are still being copied."""
        self._snapshot.wait_for_staging()

    def poll(self) -> CommitResult | None:
        """The result of the pending commit, once it has finished; None before, and if there is none.

        Raises:
            SupersededError: a later generation has started; the checkpoint was not committed.
        """
        pending = self._pending
        if pending is None or not pending.done.is_set():
            return None
        self._pending = None
        if pending.error is not None:
            raise pending.error
        return CommitResult(pending.name, pending.manifest, pending.stall_seconds, pending.seconds)

    def wait(self, while_waiting: Callable[[], None] = lambda: None) -> CommitResult | None:
        """Wait for the pending commit, if there is one, and return its result.

        Args:
            while_waiting: called every 0.2 s meanwhile.

        Raises:
            SupersededError: as for `poll`.
        """
        while self._pending is not None and not self._pending.done.wait(0.2):
            while_waiting()
        return self.poll()

    def abandon(self) -> None:
        """End the pending commit, unfinished as if the process had been killed. Nothing may be saved afterwards.

        Waits for a moment only: a volume that does not respond blocks the thread.
        """
        self._abandoned.set()
        if self._reservation is not None:
            self._reservation.join(_ABANDON_SECONDS)

    def _raise_if_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError

    def _run(self, pending: _PendingSave, make_manifest: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        try:
            folder = self._directory.checkpoints / str(pending.name)
            fragments = self._snapshot.fragments()
            entry = self._retry(
                pending, lambda: write_fragments(folder, self._rank, fragments, self._raise_if_abandoned)
            )
            self._snapshot.complete(pending.name, entry)
            if self._bucket is not None:
                self._upload(self._bucket, pending)
            if self._rank == 0:
                self._retry(pending, lambda: raise_if_superseded(self._directory, pending.name.generation))
                pending.manifest = self._retry(
                    pending,
                    lambda: commit(self._directory, pending.name, self._world_size, make_manifest, self._wait),
                )
                self._retry(pending, lambda: self._prune(pending.name.generation))
            elif self._bucket is not None:
                self._wait_for_manifest(self._bucket, pending)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            pending.error = error
        finally:
            pending.seconds = self._clock() - pending.started
            pending.done.set()
        if pending.error is None:
            self._snapshot.reserve_next()

    def _upload(self, bucket: Bucket, pending: _PendingSave) -> None:
        """Upload this rank's file and its `.ok` file, until the bucket has them."""
        folder = self._directory.checkpoints / str(pending.name)

        def report(_count: int) -> None:
            self._bucket_progress += 1
            self._raise_if_abandoned()

        self._retry(
            pending, lambda: upload_rank_file(bucket, folder, rank_file(self._rank), rank_ok(self._rank), report)
        )
        drop_older_copies(self._directory, pending.name)

    def _wait_for_manifest(self, bucket: Bucket, pending: _PendingSave) -> None:
        """Note the commit on this machine, for its agent copies only what is committed to other nodes."""
        folder = self._directory.checkpoints / str(pending.name)
        self._retry(pending, lambda: wait_for_manifest(bucket, folder, self._wait))

    def _wait(self) -> None:
        """While waiting for other ranks: a bucket that answers is progress, since uploads of others do not show."""
        self._bucket_progress += self._bucket is not None
        self._raise_if_abandoned()

    def _prune(self, generation: int) -> None:
        prune(self._directory, generation, self._checkpoint.keep, self._checkpoint.keep_every_steps, self._best)

    def _retry(self, pending: _PendingSave, write: Callable[[], T]) -> T:
        """Repeat a write until the volume accepts it, with exponential backoff."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                result = write()
            except OSError as error:
                pending.retries += 1
                pending.problem = f"the commit of step {pending.name.step} failed and will be retried: {error}"
                logger.warning("%s", pending.problem)
                self._abandoned.wait(delay)
                self._raise_if_abandoned()
                delay = min(2 * delay, _LONGEST_RETRY_SECONDS)
            else:
                pending.problem = None
                return result
