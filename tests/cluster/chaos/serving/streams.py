"""Pods whose clients read streams of the service while faults are injected, and what they have seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_testcluster.errors import ClusterError
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for
from tests.cluster.chaos.serving.stream_client import Answer
from tests.cluster.pods import pod, restricted, run_in, wait_until_running

CLIENTS = 3
PROMPTS = 24
TOKENS = 96
_PAUSE_SECONDS = 0.5
"""Between two requests of a client: the machine of the test cluster is small."""
RETRY_SECONDS = 300.0
"""A request that was refused before its first text is sent again for so long."""
_SECONDS_TO_CONNECT = 60.0
_SECONDS_OF_THE_UNDISTURBED = 300.0
_SECONDS_TO_END = 400.0
_PROGRAM = Path(__file__).with_name("stream_client.py")


@dataclass(frozen=True)
class SteadyStreams:
    """Clients in a pod that does not stop by itself.

    Attributes:
        kubectl: kubectl in its namespace.
        name: Of the pod.
    """

    kubectl: Kubectl
    name: str

    def end(self) -> None:
        """Let the clients end after the answers that they are reading, and wait for that."""
        run_in(self.kubectl, self.name, "touch", "/tmp/stop")
        self.wait_until_done(_SECONDS_TO_END)

    def wait_until_done(self, seconds: float) -> None:
        """Wait until the program has written its last answer."""
        wait_for(f"the last answers in pod {self.name}", seconds, self._is_done, every=1.0)

    def answers(self) -> list[Answer]:
        """All answers so far, in the order of their ends."""
        return [Answer(**line) for line in self._lines() if "number" in line]

    def _is_done(self) -> bool:
        return any("done" in line for line in self._lines()[-1:])

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.kubectl("logs", self.name, "--tail=-1").splitlines()]


@dataclass(frozen=True)
class StreamClients:
    """Starts clients of a service.

    Attributes:
        kubectl: kubectl in the namespace of the service.
        image: Image with the `openai` package.
        node: A node that no fault hits.
        url: URL of the service.
        model: Model id.
    """

    kubectl: Kubectl
    image: str
    node: str
    url: str
    model: str

    @contextmanager
    def steady(self, name: str) -> Iterator[SteadyStreams]:
        """Clients that ask without end."""
        with self._running(name, 0, f"--pause={_PAUSE_SECONDS}", f"--retry-seconds={RETRY_SECONDS}") as streams:
            yield streams

    def undisturbed(self) -> list[str]:
        """The text of every prompt, which is asked twice.

        Raises:
            ClusterError: A request failed, or the two texts of a prompt differ.
        """
        # The first connections may be refused: nodes learn of a Ready service with a delay.
        with self._running("undisturbed", 2, f"--retry-seconds={_SECONDS_TO_CONNECT}") as streams:
            streams.wait_until_done(_SECONDS_OF_THE_UNDISTURBED)
            return texts_by_number(streams.answers())

    @contextmanager
    def _running(self, name: str, rounds: int, *options: str) -> Iterator[SteadyStreams]:
        given = (f"--url={self.url}", f"--model={self.model}", f"--tokens={TOKENS}", f"--prompts={PROMPTS}")
        counts = (f"--clients={CLIENTS}", f"--rounds={rounds}")
        command = ("python", "-c", _PROGRAM.read_text(), *given, *counts, *options)
        self.kubectl.apply(restricted(pod(name, self.image, command, node=self.node)))
        try:
            wait_until_running(self.kubectl, name)
            yield SteadyStreams(self.kubectl, name)
        finally:
            with suppress(ClusterError):
                self.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


def texts_by_number(answers: Sequence[Answer]) -> list[str]:
    """The text of each prompt.

    Raises:
        ClusterError: A request failed, or two texts of a prompt differ.
    """
    texts: dict[int, str] = {}
    for answer in answers:
        if answer.error:
            raise ClusterError(f"an undisturbed request failed: {answer.error}")
        if texts.setdefault(answer.number, answer.text) != answer.text:
            raise ClusterError(f"the undisturbed answers to prompt {answer.number} differ")
    return [texts[number] for number in sorted(texts)]
