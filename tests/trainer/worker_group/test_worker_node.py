"""The first process of a worker pod, with shell commands in place of Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spotune_trainer.worker_group.agent_link import AgentState
from spotune_trainer.worker_group.worker_node import WorkerNode
from tests.trainer.support.waiting import wait_until

TRAINED = [(Path("agent"), AgentState(gpus=False, devices=None, ranks=0, driver="", has_trained=True))]
RANKS = [(Path("agent"), AgentState(gpus=False, devices=None, ranks=2, driver="driver"))]


def test_without_ranks_the_container_ends_with_the_status_of_ray() -> None:
    assert WorkerNode(["bash", "-c", "exit 3"], ("127.0.0.1", 9), 1.0, agents=list).run() == 3


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        (RANKS, "Ray has ended, and ranks train on: waiting for the next head"),
        (TRAINED, "Ray has ended, and the ranks have trained the model: waiting for the next head"),
    ],
)
def test_while_ranks_run_or_have_trained_ray_is_started_again_once_a_head_answers(
    tmp_path: Path, kept: list[tuple[Path, AgentState]], line: str
) -> None:
    starts, lines = tmp_path / "starts", list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = ("127.0.0.1", int(listener.getsockname()[1]))

        def agents() -> list[tuple[Path, AgentState]]:
            return kept if len(starts.read_text()) < 3 else []  # they end during the third start

        node = WorkerNode(["bash", "-c", f"echo -n x >> {starts}; exit 7"], head, 1.0, agents, lines.append)
        assert node.run() == 7
    assert starts.read_text() == "xxx"
    assert lines == [line, line]


_TERMINATED = """
import sys
from pathlib import Path
from spotune_trainer.worker_group.agent_link import AgentState
from spotune_trainer.worker_group.worker_node import WorkerNode

folder = Path(sys.argv[1])
ray = f"trap 'touch {folder}/drained; exit 0' TERM; touch {folder}/started; while true; do sleep 0.05; done"
trained = AgentState(gpus=False, devices=None, ranks=0, driver="", has_trained=True)
node = WorkerNode(["bash", "-c", ray], ("127.0.0.1", 9), 600.0, agents=lambda: [(folder / "agent", trained)])
sys.exit(node.run())
"""


def test_sigterm_reaches_ray_and_the_container_ends_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _TERMINATED, str(tmp_path)])
    assert wait_until((tmp_path / "started").exists, 60.0)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60.0) == 0
    assert (tmp_path / "drained").exists()
