"""The node of a straggler is left out only if enough workers remain, also where pods share nodes. Ray is simulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from spotune.job.pools import GPU_TYPE_RESOURCE
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankExit, RankPlacement, RankResult, WorkerTask
from spotune_trainer.worker_group.agent_pool import AgentPool
from spotune_trainer.worker_group.node_state import NodeInfo
from tests.trainer.support.waiting import wait_until


class Answer:
    """A reference of Ray's to the result of a call."""

    def __init__(self, value: object = None, *, ended: bool = True) -> None:
        self.value = value
        self.ended = threading.Event()
        if ended:
            self.ended.set()


class Agent:
    """The actor of a pod on the node of this name; its ranks run until `end`."""

    def __init__(self, node: str) -> None:
        self._info = NodeInfo("10.0.0.1", 1 << 30, None, node, "boot")
        self._ranks = Answer(ended=False)
        self.call = SimpleNamespace(remote=self._call)
        self.block_forever = SimpleNamespace(remote=lambda: Answer(ended=False))
        self.exit_agent = SimpleNamespace(remote=Answer)

    @property
    def has_ranks(self) -> bool:
        return self._ranks.value is not None

    def end(self) -> None:
        self._ranks.ended.set()

    def _call(self, method: str, *args: Any, **_: Any) -> Answer:
        if method == "run_ranks":
            places: Sequence[RankPlacement] = args[1]
            self._ranks.value = [RankResult(place.rank, 0, RankExit.YIELDED) for place in places]
            return self._ranks
        return Answer({"info": self._info, "free_port": 29500}.get(method))


class Pool(AgentPool):
    """Pods with one slot each, by the names of their nodes and the types of their GPUs."""

    def __init__(self, directory: Path, nodes: str, types: str) -> None:
        self.pods = [Agent(node) for node in nodes]
        described = [
            {"NodeID": str(number), "Alive": True, "Resources": {"CPU": 1.0, f"{GPU_TYPE_RESOURCE}{kind}": 1.0}}
            for number, kind in enumerate(types)
        ]
        super().__init__(directory, nodes=lambda: described, draining=dict)

    def _start_actor(self, node: str, slots: int, gpus: bool) -> Any:
        return self.pods[int(node)]


@pytest.fixture(autouse=True)
def simulated_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(answers: list[Answer], *, timeout: float | None = None, **_: Any) -> tuple[list[Answer], list[Answer]]:
        while timeout is None and not any(answer.ended.is_set() for answer in answers):
            time.sleep(0.01)
        return [each for each in answers if each.ended.is_set()], [each for each in answers if not each.ended.is_set()]

    replaced: dict[str, Callable[..., Any]] = {"wait": wait, "get": lambda answer, **_: answer.value, "put": Answer}
    for name, function in replaced.items():
        monkeypatch.setattr(ray, name, function)
    monkeypatch.setattr(ray, "kill", lambda _: None)


@pytest.mark.parametrize(
    ("nodes", "types", "workers", "others"),
    [
        ("abc", "xxx", 3, 2),
        ("aab", "xxx", 3, 1),  # the second pod of the node is left out, too
        ("aaa", "xxx", 3, 0),
        ("abc", "xxy", 2, 1),  # types of GPUs never train together
    ],
)
def test_node_of_a_straggler_is_left_out_only_if_enough_workers_remain(
    tmp_path: Path, nodes: str, types: str, workers: int, others: int
) -> None:
    JobDirectory(tmp_path).logs.mkdir()
    pool = Pool(tmp_path, nodes, types)
    assert wait_until(lambda: pool.ensure(gpus=False).ready == workers, 10.0)
    task = WorkerTask(str(tmp_path), 1, None, {}, {})
    group = threading.Thread(target=pool.run_group, args=(task, workers), daemon=True)
    group.start()
    assert wait_until(lambda: sum(pod.has_ranks for pod in pool.pods) == workers, 10.0)
    assert not pool.leave_out(0, "rank 0 is slow", at_least=others + 1)
    assert pool.leave_out(0, "rank 0 is slow", at_least=others)
    for pod in pool.pods:
        pod.end()
    group.join()
    assert pool.ensure(gpus=False).ready == others
