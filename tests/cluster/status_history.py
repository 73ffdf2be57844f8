"""Every status that a FinetuneJob has had, as anybody with `kubectl get --watch` sees it."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for

_SECONDS_TO_REJOIN = 1.0


@dataclass(frozen=True)
class ObservedJob:
    """A FinetuneJob as it was when somebody saw it.

    Attributes:
        time: Seconds since the epoch.
        job: The object.
    """

    time: float
    job: dict[str, Any]

    @property
    def uid(self) -> str:
        """Which object it was."""
        found: str = self.job["metadata"]["uid"]
        return found

    @property
    def status(self) -> dict[str, Any]:
        """Its status, {} before the first."""
        found: dict[str, Any] = self.job.get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of a type, {} where there is none."""
        found = [condition for condition in self.status.get("conditions", []) if condition["type"] == kind]
        return found[0] if found else {}

    def holds(self, kind: str) -> bool:
        """Whether a condition is True."""
        return bool(self.condition(kind).get("status") == "True")


class StatusHistory:
    """Watches one job from a thread, from before it is there until it is left; a context manager.

    An API server that restarts ends the watch; the next one begins with the object as it is then.
    """

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self.name = name
        self._command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
        self._command += ["get", "finetunejobs", f"--field-selector=metadata.name={name}", "--watch", "--output=json"]
        self._seen: list[ObservedJob] = []
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    @property
    def seen(self) -> list[ObservedJob]:
        """All that was seen so far, oldest first; no two in a row are the same."""
        return list(self._seen)

    @property
    def last(self) -> ObservedJob:
        """The job as it was seen last; without a status before it was seen at all."""
        return self._seen[-1] if self._seen else ObservedJob(0.0, {})

    def wait_for(
        self, what: str, seconds: float, wanted: Callable[[ObservedJob], bool], since: float = 0.0
    ) -> ObservedJob:
        """The first that is as wanted, of those seen since a time; the error says what was seen last."""

        def look() -> ObservedJob | None:
            return next((seen for seen in self._seen if seen.time >= since and wanted(seen)), None)

        try:
            return wait_for(f"{self.name}: {what}", seconds, look, every=0.1)
        except Exception as error:
            said = {name: value for name, value in self.last.status.items() if name != "pinned"}
            error.add_note(f"its status was: {json.dumps(said)}")
            raise

    def _watch(self) -> None:
        while not self._stop.is_set():
            with subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                self._process = process
                if self._stop.is_set():
                    process.kill()
                assert process.stdout is not None
                for job in _objects(iter(process.stdout.readline, "")):
                    if not self._seen or self._seen[-1].job != job:
                        self._seen.append(ObservedJob(time.time(), job))
            self._stop.wait(_SECONDS_TO_REJOIN)


def _objects(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Objects of kubectl's output, in which each begins and ends with a brace at the start of a line."""
    text: list[str] = []
    for line in lines:
        text.append(line)
        if line.rstrip() == "}":
            yield json.loads("".join(text))
            text = []
