"""The quick start without a cloud: the commands of its page, as a reader types them, on a cluster of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import ROOT
from tests.pages import blocks, lines

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs/quick-start/test-cluster.md"
CLUSTER = {"SPOTUNE_TESTCLUSTER": "quick-start"}
DONE = "make setup cluster-packages cluster-build"
"""The only line that is not run: `make test` has done it."""


class Terminal:
    """A shell in a folder that looks like a fresh clone.

    Attributes:
        folder: The current folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in ROOT.iterdir():
            if path.name not in ("build", "runs"):
                (folder / path.name).symlink_to(path)
        (folder / "exported").touch()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, line: str) -> Callable[[], str]:
        """Start a command line with the variables that were exported before; the result waits for its output."""
        script = f"set -e; . ./exported; {line}\nexport -p > exported.$$; mv exported.$$ exported"
        shown = self.folder / f"output-{len(self._started)}"
        with shown.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=os.environ | CLUSTER,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)

        def finish() -> str:
            code, text = process.wait(), shown.read_text()
            sys.stdout.write(f"$ {line}\n{text}\n")
            assert code == 0, f"$ {line}\n{text}"
            return text

        return finish

    def run(self, line: str) -> str:
        """Run a command line and return its output."""
        return self.start(line)()

    def close(self) -> None:
        """Kill what still runs, also in the background."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """See `Terminal`; its cluster and the programs that it left are gone at the end."""
    opened = Terminal(tmp_path)
    for block in blocks(PAGE, "yaml"):
        (tmp_path / block.title).write_text(block.text)
    yield opened
    opened.close()
    subprocess.run([sys.executable, "-m", "spotune_testcluster", "down"], env=os.environ | CLUSTER, check=True)


def test_commands_of_the_page_train_and_serve_a_model_through_a_lost_node(terminal: Terminal) -> None:
    typed = [line.text for line in lines(PAGE)]
    watch, service, ask = (
        next(number for number, line in enumerate(typed) if words in line)
        for words in ("spotune watch", "kubectl wait ms/", "curl")
    )
    for line in typed[:watch]:
        if line != DONE:
            terminal.run(line)
    finish_watching = terminal.start(typed[watch])
    for line in typed[watch + 1 : service]:  # in another terminal
        terminal.run(line)
    watched = finish_watching()
    assert "has completed" in watched
    assert "Loading: step 0/" not in watched, "it continues from a checkpoint"
    outputs = [terminal.run(line) for line in typed[service:]]
    assert '"text"' in outputs[ask - service]
