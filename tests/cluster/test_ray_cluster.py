"""Facts about the real Ray and KubeRay that the operator depends on. If one changes, so must a promise."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.cluster.ray_clusters import DRAIN_SECONDS, RayCluster, ray_cluster, started

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

WORKERS = 2
# Prints the deadline that each rank of a Ray Train group gets, once per rank.
PREEMPTION_PROBE = """
import time
import ray.train
from ray.train.torch import TorchTrainer

def train():
    rank = ray.train.get_context().get_world_rank()
    print("rank", rank, "runs", flush=True)
    for _ in range(600):
        found = ray.train.get_preemption_info()
        if found:
            print("rank", rank, "told", round(found.deadline_ms / 1000 - time.time(), 1), flush=True)
            return
        time.sleep(0.2)

TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
"""


@pytest.fixture(scope="module")
def ray(cluster: ClusterUnderTest, took: dict[str, float]) -> Iterator[RayCluster]:
    """One RayCluster for all tests of this module. Each test leaves it ready."""
    start = time.monotonic()
    manifest = ray_cluster("ray", cluster.image, WORKERS)
    with temporary_namespace(cluster.kubectl) as kubectl, started(kubectl, manifest) as found:
        took["first RayCluster (head and 2 workers)"] = time.monotonic() - start
        yield found


def test_head_and_workers_become_ready_on_different_nodes(ray: RayCluster) -> None:
    """Depends on it: everything, because the operator creates a RayCluster like this one."""
    nodes = {pod["spec"]["nodeName"] for pod in [ray.head(), *ray.workers()]}
    assert len(nodes) == WORKERS + 1
    assert len(ray.alive()) == WORKERS + 1


def test_job_with_the_token_runs(ray: RayCluster) -> None:
    """Depends on it: the supervisor submits drivers with the token of the Secret that KubeRay makes."""
    status, answer = ray.submit("echo trained", "with-token")
    assert status == 200, answer
    assert ray.wait_for_job("with-token") == "SUCCEEDED"
    assert "trained" in ray.job_log("with-token")


@pytest.mark.parametrize(("token", "status"), [("", 401), ("wrong", 403)])
def test_job_without_the_token_is_refused(ray: RayCluster, token: str, status: int) -> None:
    """Depends on it: nobody in the cluster's network can run code in a job's pods."""
    body = {"entrypoint": "echo never", "submission_id": "without-token"}
    assert ray.ask("POST", "/api/jobs/", body, token=token)[0] == status
    assert ray.ask("GET", "/api/jobs/without-token")[0] == 404


@pytest.mark.long
def test_deleted_head_keeps_the_worker_pods(ray: RayCluster) -> None:
    """Depends on it: on head loss the operator does nothing; the workers keep GPU nodes, image and caches.

    The new head does not know the old submission id, so the supervisor must submit again, under any id.
    """
    before = {pod["metadata"]["uid"] for pod in ray.workers()}
    old_head = ray.head()["metadata"]["uid"]
    assert ray.submit("sleep 600", "before-the-loss")[0] == 200
    ray.kubectl("delete", "pod", ray.head()["metadata"]["name"])
    ray.wait_until_ready(WORKERS)
    assert ray.head()["metadata"]["uid"] != old_head
    assert {pod["metadata"]["uid"] for pod in ray.workers()} == before
    assert ray.ask("GET", "/api/jobs/before-the-loss")[0] == 404
    assert ray.submit("echo again", "after-the-loss")[0] == 200
    assert ray.wait_for_job("after-the-loss") == "SUCCEEDED"


@pytest.mark.long
def test_killed_head_container_heals_without_kuberay(ray: RayCluster, fault: Fault) -> None:
    """Depends on it: training survives a head loss while every operator is down, because the kubelet suffices."""
    fault.stop_component("kuberay-operator")
    before = {pod["metadata"]["uid"] for pod in [ray.head(), *ray.workers()]}
    restarts = _restarts(ray)
    ray.kubectl("exec", ray.head()["metadata"]["name"], "--container=ray-head", "--", "pkill", "-KILL", "gcs_server")
    wait_for("restart of the head's container", 120, lambda: _restarts(ray) > restarts, every=0.3)
    ray.wait_until_ready(WORKERS)
    assert {pod["metadata"]["uid"] for pod in [ray.head(), *ray.workers()]} == before


@pytest.mark.long
def test_force_deleted_worker_is_replaced(ray: RayCluster) -> None:
    """Depends on it: the operator never creates worker pods, it only deletes dead ones so that KubeRay can."""
    lost, kept = ray.workers()
    ray.kubectl("delete", "pod", lost["metadata"]["name"], "--force", "--grace-period=0")
    ray.wait_until_ready(WORKERS)
    uids = {pod["metadata"]["uid"] for pod in ray.workers()}
    assert kept["metadata"]["uid"] in uids
    assert lost["metadata"]["uid"] not in uids


def test_graceful_deletion_of_a_busy_worker_tells_every_rank_its_deadline(ray: RayCluster) -> None:
    """Depends on it: after a spot notice all ranks make a last commit before the node is lost.

    SIGTERM reaches `ray start` (PID 1 of the container), which drains for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S.
    """
    script = json.dumps(PREEMPTION_PROBE)
    assert ray.submit(f"env RAY_DEDUP_LOGS=0 python -c 'exec({script})'", "preempted")[0] == 200
    ranks = {"0", "1"}
    wait_for("both ranks", 240, lambda: set(_said(ray, r"rank (\d) runs()")) == ranks, every=0.5)
    ray.kubectl("delete", "pod", ray.workers()[0]["metadata"]["name"], "--wait=false")
    told = r"rank (\d) told (\S+)"
    wait_for("the notice on both", DRAIN_SECONDS, lambda: set(_said(ray, told)) == ranks, every=0.3)
    assert all(0 < float(seconds) <= DRAIN_SECONDS for seconds in _said(ray, told).values())
    assert ray.wait_for_job("preempted") == "SUCCEEDED"
    ray.wait_until_ready(WORKERS)


@pytest.mark.long
def test_pod_of_a_crashed_node_is_replaced_only_when_its_object_is_gone(ray: RayCluster, fault: Fault) -> None:
    """Depends on it: the operator force-deletes Ray pods that are Terminating on dead nodes. Nothing else does."""
    head = ray.head()["spec"]["nodeName"]
    lost = next(pod for pod in ray.workers() if pod["spec"]["nodeName"] != head)
    name, uid = lost["metadata"]["name"], lost["metadata"]["uid"]
    fault.crash_node(lost["spec"]["nodeName"])
    wait_for("deletion mark", 120, lambda: _is_terminating(ray, name), every=0.5)
    time.sleep(15)  # KubeRay has had several passes
    assert uid in {pod["metadata"]["uid"] for pod in ray.workers()}
    assert len(ray.workers()) == WORKERS
    ray.kubectl("delete", "pod", name, "--force", "--grace-period=0")
    wait_for("the replacement", 120, lambda: _replaced(ray, uid), every=0.5)
    fault.start_node(lost["spec"]["nodeName"])
    ray.wait_until_ready(WORKERS)


def _said(ray: RayCluster, pattern: str) -> dict[str, str]:
    """The output of each rank of the job `preempted`; Ray may show a line more than once."""
    return dict(re.findall(pattern, ray.job_log("preempted")))


def _restarts(ray: RayCluster) -> int:
    count: int = ray.head()["status"]["containerStatuses"][0]["restartCount"]
    return count


def _is_terminating(ray: RayCluster, name: str) -> bool:
    return any(pod["metadata"]["name"] == name and "deletionTimestamp" in pod["metadata"] for pod in ray.workers())


def _replaced(ray: RayCluster, uid: str) -> bool:
    uids = {pod["metadata"]["uid"] for pod in ray.workers()}
    return len(uids) == WORKERS and uid not in uids
