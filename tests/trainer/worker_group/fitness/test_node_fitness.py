"""Nodes are checked before they are used, on a real Ray of two nodes, one of which has a GPU with ECC errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.worker_group.agent_daemon import PROCESS_NAME
from spotune_trainer.worker_group.agent_pool import AgentPool
from spotune_trainer.worker_group.fitness.node_fitness import NodeFitness
from spotune_trainer.worker_group.result import Failed, Slots, Trained, Yielded
from tests.trainer.support.agent_cluster import Cluster, Group, kill, started_cluster, until
from tests.trainer.support.nvidia_smi import install_nvidia_smi
from tests.trainer.support.runs import Runs
from tests.trainer.training_functions.ranks import function_job, next_task

pytestmark = pytest.mark.ray

FAULT = "GPU 0 (NVIDIA H100 80GB HBM3): 2 uncorrected ECC errors since the driver was loaded"


@pytest.fixture(scope="module")
def cluster(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray of two nodes with a slot each, whose second one is bad. Its job has all nodes checked."""
    folder = tmp_path_factory.mktemp("bin")
    install_nvidia_smi(folder, bad_node="n2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setenv("SPOTUNE_NODE", "n1")
        with started_cluster(runs, tmp_path_factory.mktemp("ray"), 1, 1) as cluster:
            job = JobDirectory(cluster.directory).job
            files.write_json(job, {"spec": {"workers": {"nodeCheck": "always"}}})
            yield cluster


def wait_until_known(pool: AgentPool) -> None:
    """Wait until the good node is ready and the bad one is left out."""
    until(lambda: pool.ensure(gpus=False) == Slots(1, 1, 1) and pool.unfit_nodes())


def test_unfit_node_is_left_out_and_known_ones_are_not_checked_again(cluster: Cluster) -> None:
    directory = JobDirectory(cluster.directory)
    ledger, pool = Ledger(directory), cluster.agents
    wait_until_known(pool)
    found = {event["node"]: event for event in ledger.records("node-checked")}
    assert sorted(found) == ["n1", "n2"]
    for event in found.values():
        device = event["devices"][0]
        assert (device["kind"], device["problems"]) == ("cpu", [])
        assert device["tflops"] > 0
        assert device["checked_bytes"] >= 8 << 20
    (unfit,) = pool.unfit_nodes()
    assert (unfit["node"], unfit["reason"]) == ("n2", FAULT)

    assert isinstance(pool.run_group(cluster.task(), 1), Trained)
    assert pool.ensure(gpus=False).nodes == 1, "the bad node stays out"

    agent = cluster.agent()
    kill(agent)
    until(lambda: pool.ensure(gpus=False).ready and {*cluster.named(PROCESS_NAME).values()} - {agent})
    wait_until_known(pool)
    assert len(ledger.records("node-checked")) == 2, "a new agent checks a known node again"
    known = NodeFitness(directory).unfit_nodes()
    assert [{**each, "inUse": False} for each in known] == pool.unfit_nodes(), "another driver knows less"


@pytest.mark.long
def test_node_is_checked_again_after_a_rank_met_an_error_of_hardware(cluster: Cluster, tmp_path: Path) -> None:
    ledger, pool = Ledger(JobDirectory(cluster.directory)), cluster.agents
    wait_until_known(pool)
    checked = len(ledger.records("node-checked"))
    for function, cause, checks in (
        ("raises", FailureCause.APP_ERROR, 0),
        ("meets_a_bad_gpu", FailureCause.INFRASTRUCTURE, 1),
    ):
        result = pool.run_group(next_task(JobDirectory(tmp_path / function), function_job(function, {})), 1)
        assert isinstance(result, Failed)
        assert result.cause is cause
        wait_until_known(pool)
        assert len(ledger.records("node-checked")) == checked + checks


def test_node_of_a_rank_is_left_out_only_if_enough_others_are_ready(cluster: Cluster) -> None:
    pool = cluster.agents
    wait_until_known(pool)
    assert not pool.leave_out(0, "no rank runs", at_least=0)
    group = Group(pool, cluster.task(epochs=10_000), 1)
    until(lambda: len(list(files.read_lines(group.task.logs.steps))) > 1)
    assert not pool.leave_out(0, "rank 0 is slow", at_least=1)
    assert pool.leave_out(0, "rank 0 is slow", at_least=0)
    assert {each["node"]: each["reason"] for each in pool.unfit_nodes()} == {"n1": "rank 0 is slow", "n2": FAULT}
    assert {each["node"]: each["inUse"] for each in pool.unfit_nodes()} == {"n1": True, "n2": False}
    assert pool.ensure(gpus=False).nodes == 0
    write_notice(group.task.logs.notice, seconds=None, reason="rank 0 is slow", leave=True)
    assert isinstance(group.result(), Yielded)
