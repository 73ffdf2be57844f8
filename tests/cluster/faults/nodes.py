"""Faults of nodes: crashes under a job's pods, and lost GPUs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from spotune_testcluster.providers import Capacity, Provider
from spotune_testcluster.settings import NodeSettings
from spotune_testcluster.waiting import wait_for
from tests.cluster.chart import HEALING
from tests.cluster.faults.harness import FaultHarness

_SPARE = NodeSettings(number=4, provider=Provider.AKS, zone="westeurope-1")
_SPARE_WITH_A_GPU = NodeSettings(number=5, provider=Provider.AKS, capacity=Capacity.SPOT, gpus=1, zone="westeurope-1")
_GPU = "GPU-0"
_RESOURCE = "nvidia.com/gpu"


def node_of_a_worker_crashed(harness: FaultHarness) -> None:
    """The pod object stays. The operator has to delete it, or KubeRay would wait forever."""
    with harness.expect_recovery("workerLost", lost_workers=1):
        harness.fault.crash_node(harness.job.pods("workers")[0]["spec"]["nodeName"])


def node_of_the_head_crashed(harness: FaultHarness) -> None:
    """The operator is lost with the head. A spare on-demand node exists, as an autoscaler would provide."""
    with _spare_node(harness):
        node = harness.job.head()["spec"]["nodeName"]
        assert harness.operator.pod()["spec"]["nodeName"] == node, "the operator is to be lost with the head"
        with harness.expect_recovery("headLost", continues=True):
            injected_at = time.time()
            harness.fault.crash_node(node)
            wait_for("the operator on another node", 300, lambda: _operator_runs_elsewhere(harness, node), every=0.5)
            harness.operator_downtime.append((injected_at, time.time()))
        harness.fault.start_node(node)
        harness.operator.wait_until_ready()


def _operator_runs_elsewhere(harness: FaultHarness, node: str) -> bool:
    for pod in harness.operator.pods():
        conditions = {found["type"]: found["status"] for found in pod["status"].get("conditions", [])}
        if pod["spec"].get("nodeName") != node and conditions.get("Ready") == "True":
            return True
    return False


@contextmanager
def _spare_node(harness: FaultHarness) -> Iterator[None]:
    """Add a second on-demand node, and read the volume from it."""
    machine = harness.machine("another node")
    machine.add_node(_SPARE)
    harness.job.workplace.move_reader(_SPARE.name)
    try:
        yield
    finally:
        harness.job.workplace.move_reader(harness.cluster.nodes[0])


def gpu_lost(harness: FaultHarness) -> None:
    """The operator cordons the node and restarts its device plugin until the GPU is back."""
    times = ("settings.healAfterSeconds=10", "settings.healStepSeconds=20")
    with harness.operator.with_values("healing.cordon=true", "healing.restartDevicePlugin=true", *times):
        node = harness.job.pods("workers")[0]["spec"]["nodeName"]
        with harness.expect_recovery():
            harness.fault.set_gpu(node, _GPU, "failed")
            wait_for(f"loss of the GPU of {node}", 60, lambda: _gpus(harness, node) == 0, every=0.3)
            wait_for(
                f"healing of {node}", 300, lambda: _gpus(harness, node) == 1 and _takes_pods(harness, node), every=0.5
            )


def gpu_lost_for_good(harness: FaultHarness) -> None:
    """A restarted device plugin does not find the GPU. The operator drains and removes the node; a spare exists."""
    times = ("settings.healAfterSeconds=5", "settings.healStepSeconds=15", "settings.healDrainSeconds=60")
    harness.machine("another node").add_node(_SPARE_WITH_A_GPU)
    with harness.operator.with_values(*HEALING, *times):
        node = harness.job.pods("workers")[0]["spec"]["nodeName"]
        # The drain gives the worker a notice: it is preempted, unless its end is noticed first.
        with harness.expect_recovery("preempted", "workerLost", lost_workers=1):
            harness.fault.set_gpu(node, _GPU, "lost")
            wait_for(f"the end of {node}", 300, lambda: not _is_there(harness, node), every=0.5)
    harness.fault.set_gpu(node, _GPU, "healthy")
    harness.fault.crash_node(node)
    harness.fault.start_node(node)


def _is_there(harness: FaultHarness, node: str) -> bool:
    return bool(harness.cluster.kubectl("get", "node", node, "--ignore-not-found"))


def _gpus(harness: FaultHarness, node: str) -> int:
    return int(harness.cluster.kubectl.get("node", node)["status"]["allocatable"].get(_RESOURCE, 0))


def _takes_pods(harness: FaultHarness, node: str) -> bool:
    return not harness.cluster.kubectl.get("node", node)["spec"].get("unschedulable", False)
