"""A node is lost: the next group restores what it had committed from the memory of another node."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spotune.plan.devices import free_memory_bytes, machine_memory_bytes
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.checkpoint.memory.spare_memory import shortage
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.ray_head.processes import Process, find_process
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.agent_daemon import PROCESS_NAME
from spotune_trainer.worker_group.result import Failed, Trained
from tests.trainer.support.agent_cluster import LAYOUT, Cluster, Group, kill, next_task, started_cluster, until
from tests.trainer.support.live import process_name
from tests.trainer.support.runs import (
    STEPS_PER_EPOCH,
    Runs,
    committed_state,
    sample_hashes,
    train_generation,
)

pytestmark = pytest.mark.ray

EPOCHS = 60


@pytest.fixture(scope="module")
def cluster(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of two nodes with a slot each."""
    with started_cluster(runs, tmp_path_factory.mktemp("ray"), 1, 1) as cluster:
        yield cluster


def newest(directory: JobDirectory) -> Checkpoint:
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    return checkpoint


def is_copied(task: WorkerTask, checkpoint: Checkpoint) -> bool:
    """Whether each node has copied its files of this commit to the other one."""
    logs = (task.logs.worker(rank).read_text() for rank in range(LAYOUT.world_size))
    return all(re.search(rf"{re.escape(str(checkpoint.name))}: \d+ bytes are copied to node", log) for log in logs)


def agent_of(rank: Process) -> Process:
    """The agent of a rank: the parent of the fork server that forked it."""
    process = rank
    while not process_name(process).startswith(PROCESS_NAME):
        parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found = find_process(parent)
        assert found is not None
        process = found
    return process


@pytest.mark.long
def test_state_of_a_lost_node_comes_from_another_ones_memory_and_the_weights_are_the_same(cluster: Cluster) -> None:
    """The checkpoint's files on the volume are wiped, so that only memory has their bytes."""
    if shortage(machine_memory_bytes() // 20, free_memory_bytes):
        pytest.skip("nodes refuse copies where less than a tenth of the memory is free, as on this machine now")
    cluster.ensure()
    directory, undisturbed = cluster.runs.empty("peer"), cluster.runs.empty("peer-undisturbed")
    job = cluster.runs.job(
        training={"epochs": EPOCHS}, checkpoint={"every": 4}, workers={"count": 2, "gpus": 0, "min": 2}
    )

    def start() -> Group:
        task = replace(next_task(directory, job), memory_copies=2, peer_copy_rate=10**9)
        return Group(cluster.agents, task)

    group = start()
    until(lambda: choose_checkpoint(directory).checkpoint)
    kill(cluster.ranks()["spotune-rank-0"], signal.SIGSTOP)  # no further commit is completed
    until(lambda: is_copied(group.task, newest(directory)))
    kill(agent_of(cluster.ranks()["spotune-rank-1"]))
    assert isinstance(group.result(), Failed)
    checkpoint = newest(directory)
    for entry in checkpoint.manifest.files:
        (checkpoint.path / entry.name).write_bytes(bytes(entry.size))

    cluster.ensure()
    following = start()
    assert isinstance(following.result(), Trained)
    restored = next(event for event in files.read_lines(following.task.logs.events) if event["event"] == "restored")
    assert restored["checkpoint"] == str(checkpoint.name)
    assert restored["volumeBytes"] == 0
    assert min(restored["memoryBytes"], restored["peerBytes"]) > 0

    train_generation(undisturbed, job, LAYOUT)
    assert sample_hashes(directory) == sample_hashes(undisturbed)
    steps = EPOCHS * STEPS_PER_EPOCH
    found, expected = committed_state(directory, steps), committed_state(undisturbed, steps)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
