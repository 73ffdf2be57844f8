"""Records every status of a FinetuneJob or ModelService that `kubectl get --watch` shows."""

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
    """A FinetuneJob or ModelService at the time of an observation.

    Attributes:
        time: Seconds since the epoch.
        job: The object.
    """

    time: float
    job: dict[str, Any]

    @property
    def uid(self) -> str:
        """The uid of the object."""
        found: str = self.job["metadata"]["uid"]
        return found

    @property
    def status(self) -> dict[str, Any]:
        """The status, {} before the first."""
        found: dict[str, Any] = self.job.get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of a type, {} if there is none."""
        found = [condition for condition in self.status.get("conditions", []) if condition["type"] == kind]
        return found[0] if found else {}

    def holds(self, kind: str) -> bool:
        """Whether a condition is True."""
        return bool(self.condition(kind).get("status") == "True")


class StatusHistory:
    """Watches one object from a thread, even before it exists; a context manager.

    A restart of the API server ends the watch. The next watch starts with the current object.
    """

    def __init__(self, kubectl: Kubectl, name: str, resource: str = "finetunejobs") -> None:
        self.name = name
        self._command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
        self._command += ["get", resource, f"--field-selector=metadata.name={name}", "--watch", "--output=json"]
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
        """All observations so far, oldest first; consecutive ones differ."""
        return list(self._seen)

    @property
    def last(self) -> ObservedJob:
        """The last observation; an empty one before the first."""
        return self._seen[-1] if self._seen else ObservedJob(0.0, {})

    def wait_for(
        self, what: str, seconds: float, wanted: Callable[[ObservedJob], bool], since: float = 0.0
    ) -> ObservedJob:
        """Wait for the first observation since a time that satisfies a condition; the error shows the last status."""

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
    """Parse kubectl's output. Each object starts and ends with a brace at the start of a line."""
    text: list[str] = []
    for line in lines:
        text.append(line)
        if line.rstrip() == "}":
            yield json.loads("".join(text))
            text = []
