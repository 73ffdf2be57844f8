"""The supervisor of a cluster: stays until its pod goes, whatever becomes of the attempts.

`spotune run` leaves when an attempt cannot go on, for a person sees it and starts it again. In a pod nobody does: what
is not the job's own fault is tried again, a supervisor whose job is trained elsewhere waits until that one falls
silent, and the outcome stays readable at `/progress` until the operator has taken the pod away.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spotune.errors import InfrastructureError, JobError, SupersededError, UsageError
from spotune_trainer import files
from spotune_trainer.layout import JobDirectory
from spotune_trainer.progress import Phase
from spotune_trainer.serve import ProgressServer
from spotune_trainer.supervise import StoppedError

SILENCE_SECONDS = 180.0
"""So long must the heartbeat of another supervisor's run stand still before this one takes over."""
AGAIN_SECONDS = 10.0
_POLL_SECONDS = 1.0

Say = Callable[[str], None]


class Stay:
    """Runs a job's supervisor again and again, and waits in between.

    Args:
        directory: of the job.
        run: runs a supervisor to its end, with the errors of `Supervisor.run`.
        say: tells a person.
        address: host and port that `/progress` is served at while no supervisor runs.
    """

    def __init__(self, directory: JobDirectory, run: Callable[[], None], say: Say, address: tuple[str, int]) -> None:
        self._directory = directory
        self._run = run
        self._say = say
        self._address = address
        self._stop = threading.Event()

    def stopped(self) -> bool:
        """Whether the pod is going."""
        return self._stop.is_set()

    def until_stopped(self) -> None:
        """Train, and stay until SIGTERM or SIGINT.

        Raises:
            JobError: the job cannot be trained as it is; raised when stopped, so that the outcome is seen until then.
        """
        with self._signals():
            outcome: JobError | None = None
            while not self.stopped():
                try:
                    self._run()
                    break
                except StoppedError:
                    return
                except JobError as error:
                    outcome = error
                    self._publish(error)
                    break
                except SupersededError as error:
                    self._say(f"{error}: waiting until it has been silent for {SILENCE_SECONDS:.0f} s")
                    self._wait(SILENCE_SECONDS, while_beating=True)
                except (InfrastructureError, UsageError) as error:  # a volume that cannot be written to may be mended
                    self._say(f"{error}; once more in {AGAIN_SECONDS:.0f} s")
                    self._wait(AGAIN_SECONDS)
            self._say(str(outcome) if outcome else "trained; waiting to be taken away")
            with self._served():
                self._stop.wait()
            if outcome is not None:
                raise outcome

    def _publish(self, error: JobError) -> None:
        """Show at `/progress` what no driver lived to say: that the job cannot be trained, and why."""
        status = files.read_json(self._directory.status) or {}
        if status.get("phase") != Phase.FAILED:
            self._directory.root.mkdir(parents=True, exist_ok=True)
            changes = {"phase": Phase.FAILED.value, "message": str(error), "time": time.time()}
            files.write_json(self._directory.status, {"heartbeat": 0, **status, **changes})

    def _wait(self, seconds: float, *, while_beating: bool = False) -> None:
        """Wait, and with `while_beating` anew whenever the heartbeat on the volume has changed meanwhile."""
        with self._served():
            waited, heartbeat = 0.0, self._heartbeat()
            while waited < seconds and not self._stop.wait(_POLL_SECONDS):
                waited += _POLL_SECONDS
                if while_beating and heartbeat != (heartbeat := self._heartbeat()):
                    waited = 0.0

    def _heartbeat(self) -> object:
        return (files.read_json(self._directory.status) or {}).get("heartbeat")

    @contextmanager
    def _served(self) -> Iterator[None]:
        host, port = self._address
        with ProgressServer(self._directory, lambda: None, host, port):
            yield

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """As PID 1 of a container, a process without handlers would not even see SIGTERM."""
        before = {
            number: signal.signal(number, lambda *_: self._stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
