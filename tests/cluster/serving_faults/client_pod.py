"""A pod whose clients read streams of a service through its Service, as users' pods do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spotune_testcluster.kubectl import Kubectl
from tests.cluster.pods import pod, restricted, run_in, wait_until_running
from tests.cluster.serving_faults.client import Stream

NAME = "client"
_PROGRAM = Path(__file__).with_name("client.py")
_PAGE = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


@dataclass
class Streams:
    """Running streams of one client program.

    Attributes:
        process: The program, by ``kubectl exec``.
        begun: Unix time at which each stream had its first text, or had failed.
        ended: Number of streams that had ended by then.
    """

    process: subprocess.Popen[str]
    begun: float = field(init=False)
    ended: int = field(init=False)

    def wait_until_begun(self) -> None:
        """Wait until each stream has its first text, or has failed."""
        line = json.loads(self._line())
        self.begun, self.ended = line["begun"], line["ended"]

    def results(self) -> list[Stream]:
        """Wait for the end of all streams, in the order of their numbers."""
        found = [Stream(**seen) for seen in json.loads(self._line())]
        self.process.wait()
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client program ended"
        return line


@dataclass(frozen=True)
class ClientPod:
    """The pod.

    Attributes:
        kubectl: kubectl in its namespace.
        url: URL of the service.
        model: Model id.
        tokens: Tokens of each answer.
    """

    kubectl: Kubectl
    url: str
    model: str
    tokens: int

    @contextmanager
    def streams(self, count: int, retry_seconds: float = 0.0) -> Iterator[Streams]:
        """Start streams, all at once.

        Args:
            count: Number of streams.
            retry_seconds: Time for which a request is sent again if it fails before its first text.
        """
        access = [f"--kubeconfig={self.kubectl.kubeconfig}", f"--namespace={self.kubectl.namespace}"]
        options = [f"--url={self.url}", f"--model={self.model}", f"--streams={count}", f"--tokens={self.tokens}"]
        run = [*access, "exec", "--stdin", NAME, "--", "python", "-", *options, f"--retry-seconds={retry_seconds}"]
        with (
            _PROGRAM.open() as program,
            subprocess.Popen([self.kubectl.program, *run], stdin=program, stdout=subprocess.PIPE, text=True) as process,
        ):
            try:
                yield Streams(process)
            finally:
                process.terminate()

    def texts(self, count: int) -> list[str]:
        """The whole texts of undisturbed streams, all at once."""
        with self.streams(count) as streams:
            streams.wait_until_begun()
            results = streams.results()
        errors = [stream.error for stream in results if stream.error]
        assert not errors, f"{len(errors)} of {count} streams failed, the first one with {errors[0]}"
        return [stream.text for stream in results]

    def metric(self, name: str, addresses: list[str]) -> float:
        """The sum of a metric over its labels and over gateways, by their addresses; 0 without any."""
        pages = [run_in(self.kubectl, NAME, "python", "-c", _PAGE, f"http://{at}/metrics") for at in addresses]
        lines = [line for page in pages for line in page.splitlines()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def start_client_pod(kubectl: Kubectl, image: str, node: str) -> None:
    """Start the pod."""
    kubectl.apply(restricted(pod(NAME, image, node=node)))
    wait_until_running(kubectl, NAME)
