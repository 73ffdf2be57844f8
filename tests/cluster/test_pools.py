"""Pools run dry and come back: the job moves, loses no step, and its model equals that of an undisturbed run."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.kubectl import KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster import paced
from tests.cluster.finetune_jobs import ENDLESS, PACED, WORKERS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.status_history import ObservedJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SPOT_NODES = ("n2", "n3")
CHEAP = {"name": "cheap", "capacity": "spot", "price": "0.10 USD"}
DEAR = {"name": "dear", "capacity": "on-demand", "zone": "westeurope-1", "price": "0.40 USD"}
NOWHERE = {"name": "nowhere", "capacity": "spot", "zone": "westeurope-9", "price": "0.05 USD"}


@contextmanager
def dry(cluster: ClusterUnderTest) -> Iterator[None]:
    """Until the block ends, the spot nodes take no new pods."""
    try:
        for node in SPOT_NODES:
            cluster.kubectl("cordon", node)
        yield
    finally:
        for node in SPOT_NODES:
            cluster.kubectl("uncordon", node)


def pools_of(seen: ObservedJob) -> dict[str, dict[str, Any]]:
    return {pool["name"]: pool for pool in seen.status.get("pools", [])}


def all_run_in(name: str) -> Callable[[ObservedJob], bool]:
    """Whether all workers run in one pool, and none in another."""

    def wanted(seen: ObservedJob) -> bool:
        running = {pool: found.get("running", 0) for pool, found in pools_of(seen).items()}
        return running.pop(name, 0) == WORKERS and not any(running.values())

    return wanted


def _wait_for_move(job: RunningJob, pool: str, since: float) -> None:
    """Wait until all workers run in a pool, and a worker group of theirs makes steps."""
    generation, step = job.progress()["generation"], job.progress()["step"] or 0
    job.history.wait_for(f"{WORKERS} workers in {pool}", 600, all_run_in(pool), since)
    job.wait_for_step(step + 3, generation, seconds=300)


@pytest.fixture(scope="module")
def job(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[RunningJob]:
    """A job with three pools, of which only the dear one has room at first."""
    cluster.machine_for("pools of pretended spot nodes")
    sections: dict[str, dict[str, Any]] = {
        "training": {"maxSteps": ENDLESS},
        "checkpoint": {"every": 8},
        "workers": {
            "podTemplate": paced.pod_template(PACED),
            "pools": [DEAR, CHEAP, NOWHERE],
            "poolPatience": "5s",
            "resizeCooldown": "5s",
        },
    }
    with dry(cluster), workplace.running(workplace.manifest("pools", **sections)) as found:
        yield found


@pytest.mark.long  # some minutes: pools refuse, are probed and move
def test_pools_run_dry_and_come_back(
    cluster: ClusterUnderTest,
    job: RunningJob,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    named = job.wait_for("the pool without a node", lambda seen: bool(seen.condition("PoolsMatch")))
    assert named.condition("PoolsMatch")["reason"] == "NoNodeYet"
    assert "nowhere (spot, topology.kubernetes.io/zone=westeurope-9)" in named.condition("PoolsMatch")["message"]

    job.wait_for("workers in the dear pool", all_run_in("dear"), 600)
    refused = job.wait_for("a refusal", lambda seen: pools_of(seen).get("cheap", {}).get("refusals", 0) > 0)
    assert pools_of(refused)["cheap"]["retryAt"]
    job.wait_for_commit()

    since = time.time()
    for node in SPOT_NODES:
        cluster.kubectl("uncordon", node)
    _wait_for_move(job, "cheap", since)

    since = time.time()
    with dry(cluster):
        job.kubectl("delete", "pods", "--selector=ray.io/group=cheap", "--wait=false")
        _wait_for_move(job, "dear", since)

    since = time.time()
    _wait_for_move(job, "cheap", since)
    last = job.history.wait_for("money", 60, lambda seen: bool(seen.status.get("cost")), since)
    assert last.status.get("stepsLost", 0) == 0
    assert last.status["cost"]["currency"] == "USD"
    assert last.status["cost"]["spent"] > 0
    assert last.status["cost"]["saved"] > 0
    assert {name for name, pool in pools_of(last).items() if pool.get("nodeSeconds")} == {"cheap", "dear"}

    job.finish_soon()
    job.wait_until_complete()
    artifacts = job.artifacts(tmp_path)
    expected = undisturbed(len(artifacts.steps()))
    assert artifacts.samples() == expected.samples()
    assert artifacts.sha256() == expected.sha256()


def test_overlapping_pools_are_refused_by_the_api_server(operator: Operator, workplace: Workplace) -> None:
    """The CEL rules compile, cost little enough, and name the field."""
    manifest = workplace.manifest("overlapping", workers={"pools": [CHEAP]})
    pools = manifest["spec"]["workers"]["pools"]
    for wrong, message in (
        ([*pools, {**pools[0], "name": "other"}], "two pools have the same nodes"),
        ([*pools, {**pools[0], "zone": "z", "name": "other", "price": "1 EUR"}], "different currencies"),
        ([{**pools[0], "max": 1}], "fewer pods at most"),
        ([{**pools[0], "price": "0.10"}], "spec.workers.pools[0].price"),
        ([*pools, {**pools[0], "zone": "z"}], "Duplicate value"),
        ([{**pools[0], "name": "head"}], "is the head's group"),
    ):
        manifest["spec"]["workers"]["pools"] = wrong
        with pytest.raises(KubectlError, match=message.replace("[", r"\[").replace("]", r"\]")):
            workplace.kubectl("apply", "--dry-run=server", "--filename=-", stdin=json.dumps(manifest))
