"""Node agents on a real Ray: an agent outlives its ranks, and ranks exit with their agent."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spotune.errors import InfrastructureError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.supervisor.ray_head.processes import Process
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.agent_daemon import PROCESS_NAME
from spotune_trainer.worker_group.result import Failed, Slots, Stopped, Trained, Yielded
from spotune_trainer.worker_group.worker_node import agents_to_keep
from tests.trainer.support.agent_cluster import LAYOUT, Cluster, Group, kill, next_task, started_cluster, until
from tests.trainer.support.live import held_segments
from tests.trainer.support.runs import (
    STEPS,
    STEPS_PER_EPOCH,
    Runs,
    committed_state,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.ray

SLOTS = 3


@pytest.fixture(scope="module")
def cluster(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of one node."""
    with started_cluster(runs, tmp_path_factory.mktemp("ray"), SLOTS) as cluster:
        yield cluster


def test_consecutive_groups_train_with_the_same_agent(cluster: Cluster) -> None:
    cluster.ensure()
    agent = cluster.agent()
    for _ in range(2):
        task = cluster.task()
        result = cluster.agents.run_group(task, 2)
        assert isinstance(result, Trained), result
        assert result.summary["steps"] == STEPS
        assert not cluster.ranks()
        assert cluster.agent() == agent


@pytest.mark.long
def test_slots_of_a_node_count_as_imported_once_its_fork_server_has_imported(cluster: Cluster) -> None:
    found = [cluster.agents.ensure(gpus=False)]

    def has_imported() -> bool:
        found.append(cluster.agents.ensure(gpus=False))
        return found[-1].imported == SLOTS

    until(has_imported)
    assert all(slots.imported <= slots.ready <= slots.nodes == SLOTS for slots in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the node has a GPU")
def test_memory_of_a_gpu_that_cannot_be_used_is_an_error_with_the_cause(cluster: Cluster) -> None:
    cluster.ensure()
    with pytest.raises(InfrastructureError, match=r"the GPU of node 127\.0\.0\.1 cannot be used: .*NVIDIA"):
        cluster.agents.worker_memory_bytes(1, gpus=True)


@pytest.mark.long
def test_killed_rank_is_reported_lost_and_the_other_ranks_are_killed(cluster: Cluster) -> None:
    group = cluster.start()
    agent = cluster.agent()
    assert set(cluster.ranks()) == {"spotune-rank-0", "spotune-rank-1"}
    kill(cluster.ranks()["spotune-rank-1"])
    assert group.result() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert not cluster.ranks()
    assert cluster.agent() == agent


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are kept, which is not the default."""
    monkeypatch.setenv("SPOTUNE_KEEP_RANK_PROCESSES", "1")


@pytest.mark.usefixtures("keep")
def test_killed_rank_is_reported_lost_and_the_other_rank_keeps_its_process(cluster: Cluster) -> None:
    group = cluster.start()
    agent, ranks = cluster.agent(), cluster.ranks()
    assert set(ranks) == {"spotune-rank-0", "spotune-rank-1"}
    kill(ranks["spotune-rank-1"])
    assert group.result() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert cluster.ranks() == {"spotune-rank-0": ranks["spotune-rank-0"]}
    assert cluster.agent() == agent


@pytest.mark.long
@pytest.mark.usefixtures("keep")
def test_group_without_a_lost_rank_before_it_gets_new_processes(cluster: Cluster) -> None:
    group = cluster.start()
    survivor = cluster.ranks()["spotune-rank-0"]
    kill(cluster.ranks()["spotune-rank-1"])
    group.result()
    cluster.agents._reuse_processes = False  # as after an error of the group's own
    group = cluster.start()
    assert survivor not in cluster.ranks().values()
    kill(cluster.ranks()["spotune-rank-1"])
    group.result()


@pytest.mark.long
@pytest.mark.usefixtures("keep")
def test_suspended_process_that_stays_is_killed_and_replaced(cluster: Cluster) -> None:
    """It does not answer to its next assignment, so the group fails, and the one after it has a new process."""
    group = cluster.start()
    survivor = cluster.ranks()["spotune-rank-0"]
    kill(cluster.ranks()["spotune-rank-1"])
    group.result()
    kill(survivor, signal.SIGSTOP)
    group = Group(cluster.agents, cluster.task(epochs=10_000))
    until(lambda: len(cluster.ranks()) == 2)
    kill(cluster.ranks()["spotune-rank-1"])
    assert group.result() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert not cluster.ranks()
    group = cluster.start()
    assert survivor not in cluster.ranks().values()
    kill(cluster.ranks()["spotune-rank-1"])
    group.result()


@pytest.mark.long
@pytest.mark.usefixtures("keep")
def test_processes_stay_while_the_world_shrinks_and_grows(cluster: Cluster) -> None:
    """Kills in three generations, the second of which has just begun; the weights are those of an undisturbed run."""
    cluster.ensure()
    directory, undisturbed = cluster.runs.empty("resized"), cluster.runs.empty("not-resized")
    job = cluster.runs.job(
        training={"epochs": 14},
        checkpoint={"every": 4},
        execution={"zeroStage": 2, "microBatchSize": 3, "reproducible": "worldSize"},
        workers={"count": 3, "gpus": 0},
    )
    train_generation(undisturbed, job, LAYOUT)
    steps = 14 * STEPS_PER_EPOCH
    size_of: dict[int, int] = {}
    processes: list[dict[str, Process]] = []

    def start(world_size: int) -> Group:
        task = replace(next_task(directory, job), memory_copies=2)
        size_of[task.generation] = world_size
        return Group(cluster.agents, task, world_size)

    def wait_for_new_steps(group: Group) -> None:
        until(lambda: len(list(files.read_lines(group.task.logs.steps))) > 5)
        processes.append(cluster.ranks())

    group = start(3)
    wait_for_new_steps(group)
    kill(cluster.ranks()["spotune-rank-2"])
    group.result()
    remaining = cluster.ranks()
    group = start(3)
    until(lambda: len(cluster.ranks()) == 3)
    kill(cluster.ranks()["spotune-rank-2"])  # before the group has met
    group.result()
    group = start(2)
    wait_for_new_steps(group)
    write_notice(group.task.logs.notice, seconds=None, reason="there are slots for 3 workers", leave=True)
    assert isinstance(group.result(), Yielded)
    group = start(3)
    wait_for_new_steps(group)
    assert isinstance(group.result(), Trained)

    first, shrunk, grown = processes
    assert remaining == {name: first[name] for name in ("spotune-rank-0", "spotune-rank-1")}
    assert {name: process for name, process in grown.items() if name != "spotune-rank-2"} == shrunk
    assert grown["spotune-rank-2"] != first["spotune-rank-2"]
    assert sample_hashes(directory) == sample_hashes(undisturbed)
    found, expected = committed_state(directory, steps), committed_state(undisturbed, steps)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_next_group_restores_the_commit_of_a_killed_rank_from_memory(cluster: Cluster) -> None:
    """The checkpoint's files on the volume are wiped, so that only memory has their bytes."""
    cluster.ensure()
    directory = cluster.runs.empty("memory")
    job = cluster.runs.job(training={"epochs": 10_000}, checkpoint={"every": 4}, workers={"count": 2, "gpus": 0})

    def task() -> WorkerTask:
        return replace(next_task(directory, job), memory_copies=2)

    group = Group(cluster.agents, task())
    until(lambda: choose_checkpoint(directory).checkpoint)
    kill(cluster.ranks()["spotune-rank-1"])
    assert isinstance(group.result(), Failed)
    assert cluster.agent_memory_bytes() > 0, "the agent keeps what the killed ranks had committed"
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    for entry in checkpoint.manifest.files:
        (checkpoint.path / entry.name).write_bytes(bytes(entry.size))
    following = Group(cluster.agents, task())
    until(lambda: len(list(files.read_lines(following.task.logs.steps))) > 3)
    restored = next(event for event in files.read_lines(following.task.logs.events) if event["event"] == "restored")
    assert restored["checkpoint"] == str(checkpoint.name)
    assert restored["volumeBytes"] == 0 < restored["memoryBytes"]
    write_notice(directory.notice, seconds=30, stop=True, reason="the test ends")
    assert isinstance(following.result(), Stopped)
    assert cluster.agent_memory_bytes() == 0, "no group follows"


@pytest.mark.long
def test_memory_of_a_killed_agent_is_freed(cluster: Cluster) -> None:
    cluster.ensure()
    group = Group(cluster.agents, replace(cluster.task(epochs=10_000), memory_copies=2))
    until(lambda: cluster.agent_memory_bytes() > 0)
    kill(cluster.agent())
    group.result()
    until(lambda: not cluster.ranks())
    until(lambda: not any(held_segments(process) for process in cluster.family.members()))
    cluster.ensure()


@pytest.mark.long
def test_suspended_rank_is_killed_after_another_rank_failed(cluster: Cluster) -> None:
    group = cluster.start()
    kill(cluster.ranks()["spotune-rank-0"], signal.SIGSTOP)
    kill(cluster.ranks()["spotune-rank-1"])
    assert group.result() == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")
    assert not cluster.ranks()


def test_ranks_exit_with_their_agent_and_a_new_agent_replaces_it(cluster: Cluster) -> None:
    group = cluster.start()
    agent = cluster.agent()
    kill(agent)
    result = group.result()
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.WORKER_LOST
    assert result.message.startswith("lost rank 0 (ActorDiedError), rank 1 (")
    until(lambda: not cluster.ranks())
    cluster.ensure()
    assert cluster.agent() != agent


def test_ranks_train_on_without_a_driver_and_the_next_driver_gets_their_results(cluster: Cluster) -> None:
    group = cluster.start()
    agent, ranks = cluster.agent(), cluster.ranks()
    lose_driver(cluster)
    assert isinstance(group.result(), Failed), "the lost driver's view"
    step = len(list(files.read_lines(group.task.logs.steps)))
    until(lambda: len(list(files.read_lines(group.task.logs.steps))) > step + 3)

    cluster.agents = cluster.new_pool()
    cluster.ensure()
    assert (cluster.agent(), cluster.ranks()) == (agent, ranks)
    assert cluster.agents.find_group(group.task.generation + 1) is None
    found = cluster.agents.find_group(group.task.generation)
    assert found is not None
    assert (found.is_complete, found.world_size, found.has_failed) == (True, 2, False)
    kill(ranks["spotune-rank-1"])
    until(lambda: not cluster.ranks())
    assert cluster.agents.adopt_group(found) == Failed(FailureCause.WORKER_LOST, "lost rank 1 (SIGKILL)")


def test_ranks_that_train_to_the_end_without_a_driver_leave_their_results_to_the_next_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.ensure()
    environment = Path(f"/proc/{cluster.agent().pid}/environ").read_bytes().split(b"\0")
    temporary = next(value for value in environment if value.startswith(b"TMPDIR=")).decode().partition("=")[2]
    monkeypatch.setattr(tempfile, "tempdir", temporary)  # as in the pod, where all processes have the same
    group = Group(cluster.agents, cluster.task(epochs=30))
    until(lambda: len(list(files.read_lines(group.task.logs.steps))) > 1)
    assert [state.has_trained for _, state in agents_to_keep()] == [False]
    lose_driver(cluster)
    assert isinstance(group.result(), Failed), "the lost driver's view"
    until(lambda: [(state.has_trained, state.ranks) for _, state in agents_to_keep()] == [(True, 0)])

    cluster.agents = cluster.new_pool()
    cluster.ensure()
    found = cluster.agents.find_group(group.task.generation)
    assert found is not None
    assert found.is_complete
    result = cluster.agents.adopt_group(found)
    assert isinstance(result, Trained)
    assert result.summary["steps"] == 30 * STEPS_PER_EPOCH


def test_driver_that_starts_another_group_ends_the_ranks_of_an_earlier_driver(cluster: Cluster) -> None:
    group = cluster.start()
    ranks = cluster.ranks()
    lose_driver(cluster)
    group.result()
    cluster.agents = cluster.new_pool()
    cluster.ensure()
    assert isinstance(cluster.agents.run_group(cluster.task(), 2), Trained)
    assert not any(process.is_alive() for process in ranks.values())


def lose_driver(cluster: Cluster) -> None:
    """Kill the Ray actors, as the loss of their driver does."""
    for process in cluster.named("ray::NodeProxy").values():
        kill(process)


@pytest.mark.long
def test_ranks_exit_with_their_forkserver_and_the_next_group_gets_a_new_one(cluster: Cluster) -> None:
    group = cluster.start()
    parent = int(Path(f"/proc/{cluster.ranks()['spotune-rank-0'].pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)
    result = group.result()
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.WORKER_LOST
    until(lambda: not cluster.ranks())
    assert isinstance(cluster.agents.run_group(cluster.task(), 2), Trained)


def test_group_with_more_workers_than_slots_fails_to_start(cluster: Cluster) -> None:
    cluster.ensure()
    result = cluster.agents.run_group(cluster.task(), SLOTS + 1)
    assert isinstance(result, Failed)
    assert result.message.endswith(f"there are no longer slots for {SLOTS + 1} workers")


def test_draining_node_keeps_its_agent_until_its_group_has_exited(cluster: Cluster) -> None:
    group = cluster.start()
    (node,) = cluster.agents.occupied()
    cluster.draining = {node: 0.0}
    assert cluster.agents.ensure(gpus=False) == Slots(0, 0, 0)
    assert len(cluster.ranks()) == 2
    kill(cluster.ranks()["spotune-rank-1"])
    group.result()
    assert cluster.agents.occupied() == set()
    assert cluster.agents.ensure(gpus=False) == Slots(0, 0, 0)
    until(lambda: not cluster.named(PROCESS_NAME))
    cluster.draining = {}
    cluster.ensure()
