"""The supervisor of a cluster: stays until its pod goes, whatever becomes of the attempts.

`spotune run` leaves when an attempt cannot go on, for a person sees it and starts it again. In a pod nobody does: what
is not the job's own fault is tried again, a supervisor whose job is trained elsewhere waits until that one falls
silent, one that was told to stop waits until it is told to start, and an outcome stays readable at `/progress` until
the operator has taken the pod away, or the job file has changed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spotune.errors import InfrastructureError, JobError, SupersededError, UsageError
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.progress import Phase
from spotune_trainer.supervisor.control import Orders, Standing, State
from spotune_trainer.supervisor.supervisor import StoppedError

SILENCE_SECONDS = 180.0
"""So long must the heartbeat of another supervisor's run stand still before this one takes over."""
AGAIN_SECONDS = 10.0
_POLL_SECONDS = 0.5

Say = Callable[[str], None]


class Stay:
    """Runs a job's supervisor again and again, and waits in between.

    Args:
        directory: of the job.
        run: runs a supervisor until the model is trained, with the errors of `Supervisor.run`.
        orders: what it is to do; signals are orders to leave.
        standing: told what it is doing.
        file_changed: whether the job file has changed since `run` read it.
        say: tells a person.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        directory: JobDirectory,
        run: Callable[[], None],
        orders: Orders,
        standing: Standing,
        file_changed: Callable[[], bool],
        say: Say,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._run = run
        self._orders = orders
        self._standing = standing
        self._file_changed = file_changed
        self._say = say
        self._sleep = sleep

    def until_told_to_leave(self) -> None:
        """Train, and stay until SIGTERM or SIGINT.

        Raises:
            JobError: the job cannot be trained as it is; raised when it leaves, so that the outcome is seen until then.
        """
        outcome: JobError | None = None
        with self._signals():
            while not self._orders.leaving:
                try:
                    outcome = self._train()
                except OSError as error:  # a volume that is away or full comes back
                    self._wait(f"{error}; once more in {AGAIN_SECONDS:.0f} s", AGAIN_SECONDS)
        if outcome is not None:
            raise outcome

    def _train(self) -> JobError | None:
        """Run a supervisor to its end, and wait for a reason to run another; the error of a job that has failed."""
        try:
            self._run()
        except StoppedError:
            self._stay_stopped()
        except JobError as error:
            self._stay_failed(error)
            return error
        except SupersededError as error:
            message = f"{error}: waiting until it has been silent for {SILENCE_SECONDS:.0f} s"
            self._wait(message, SILENCE_SECONDS, while_beating=True)
        except (InfrastructureError, UsageError) as error:
            if isinstance(error, InfrastructureError) and self._orders.stopping:
                self._stay_stopped()
            else:
                self._wait(f"{error}; once more in {AGAIN_SECONDS:.0f} s", AGAIN_SECONDS)
        else:
            self._say("trained; waiting to be taken away")
            self._standing.say(State.TRAINED)
            self._wait_for_another_file()
        return None

    def _stay_stopped(self) -> None:
        """Until told to start; another job file is taken in by a run that starts nothing."""
        self._say("stopped")
        self._standing.say(State.STOPPED)
        while self._orders.stopping and not (self._orders.leaving or self._file_changed()):
            self._sleep(_POLL_SECONDS)

    def _stay_failed(self, error: JobError) -> None:
        """Show at `/progress` that the job cannot be trained, and why, until its file is another one."""
        self._say(str(error))
        publish_phase(self._directory, Phase.FAILED, str(error))
        self._standing.say(State.FAILED, str(error))
        self._wait_for_another_file()

    def _wait_for_another_file(self) -> None:
        while not self._orders.leaving:
            if self._file_changed():
                self._say("the job file has changed")
                return
            self._sleep(_POLL_SECONDS)

    def _wait(self, message: str, seconds: float, *, while_beating: bool = False) -> None:
        """Wait until there are other orders, and with `while_beating` anew whenever the heartbeat has changed."""
        self._say(message)
        self._standing.say(State.WAITING, message)
        stopping, waited = self._orders.stopping, 0.0
        heartbeat = self._heartbeat() if while_beating else None
        while waited < seconds and self._orders.stopping == stopping and not self._orders.leaving:
            self._sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
            if while_beating and heartbeat != (heartbeat := self._heartbeat()):
                waited = 0.0

    def _heartbeat(self) -> object:
        return (files.read_json(self._directory.status) or {}).get("heartbeat")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """As PID 1 of a container, a process without handlers would not even see SIGTERM."""
        before = {
            number: signal.signal(number, lambda *_: self._orders.leave()) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def publish_phase(directory: JobDirectory, phase: Phase, message: str | None) -> None:
    """Put a phase into the status that no driver is there to say; what one has said of the same phase is kept."""
    status = files.read_json(directory.status) or {}
    if status.get("phase") != phase:
        directory.root.mkdir(parents=True, exist_ok=True)
        changes = {"phase": phase.value, "message": message, "time": time.time()}
        files.write_json(directory.status, {"heartbeat": 0, **status, **changes})
