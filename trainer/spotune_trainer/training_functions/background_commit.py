"""A commit that is made by a thread, while the training function goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spotune_trainer.checkpoint.layout import Checkpoint


class BackgroundCommit:
    """Begins a commit in a thread.

    Args:
        step: of the checkpoint.
        commit: makes it.
        discard: called afterwards, whether it was made or not.
        clock: seconds, monotonic.

    Attributes:
        step: of the checkpoint.
        seconds: that the commit took; known once it has ended.
    """

    def __init__(
        self, step: int, commit: Callable[[], Checkpoint], discard: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.step = step
        self.seconds = 0.0
        self._commit = commit
        self._discard = discard
        self._clock = clock
        self._committed: Checkpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive()

    def wait(self) -> Checkpoint:
        """Wait for the checkpoint. What the commit has raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._committed is not None, "the commit has ended without an error"
        return self._committed

    def _run(self) -> None:
        began = self._clock()
        try:
            self._committed = self._commit()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        finally:
            self.seconds = self._clock() - began
            self._discard()
