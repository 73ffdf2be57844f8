"""Nodes that crash under a job's pods, and GPUs that fall off the bus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from spotune_testcluster.providers import Capacity, Provider
from spotune_testcluster.settings import NodeSettings
from spotune_testcluster.waiting import wait_for
from tests.cluster.chart import HEALING
from tests.cluster.faults.harness import Scene

_SPARE = NodeSettings(number=4, provider=Provider.AKS, zone="westeurope-1")
_SPARE_WITH_A_GPU = NodeSettings(number=5, provider=Provider.AKS, capacity=Capacity.SPOT, gpus=1, zone="westeurope-1")
_GPU = "GPU-0"
_RESOURCE = "nvidia.com/gpu"


def node_of_a_worker_crashed(scene: Scene) -> None:
    """Nobody says that the pod is gone: the operator has to free its name, or KubeRay would wait for ever."""
    with scene.survives("workerLost", loses=1):
        scene.fault.crash_node(scene.job.pods("workers")[0]["spec"]["nodeName"])


def node_of_the_head_crashed(scene: Scene) -> None:
    """The operator is on that node, too; another on-demand node is there, as an autoscaler would bring one."""
    with _spare_node(scene):
        node = scene.job.head()["spec"]["nodeName"]
        assert scene.operator.pod()["spec"]["nodeName"] == node, "the operator is to be lost with the head"
        with scene.survives("headLost"):
            struck = time.time()
            scene.fault.crash_node(node)
            wait_for("the operator on another node", 300, lambda: _operator_runs_elsewhere(scene, node), every=0.5)
            scene.unattended.append((struck, time.time()))
        scene.fault.start_node(node)
        scene.operator.wait_until_ready()


def _operator_runs_elsewhere(scene: Scene, node: str) -> bool:
    for pod in scene.operator.pods():
        conditions = {found["type"]: found["status"] for found in pod["status"].get("conditions", [])}
        if pod["spec"].get("nodeName") != node and conditions.get("Ready") == "True":
            return True
    return False


@contextmanager
def _spare_node(scene: Scene) -> Iterator[None]:
    """A second on-demand node, from which the volume is read, too."""
    machine = scene.machine("another node")
    machine.add_node(_SPARE)
    scene.job.workplace.move_reader(_SPARE.name)
    try:
        yield
    finally:
        scene.job.workplace.move_reader(scene.cluster.nodes[0])


def gpu_lost(scene: Scene) -> None:
    """The operator takes the node out, and the worker that held the GPU goes to another one."""
    times = ("settings.healAfterSeconds=10", "settings.healStepSeconds=20")
    with scene.operator.with_values("healing.cordon=true", "healing.restartDevicePlugin=true", *times):
        node = scene.job.pods("workers")[0]["spec"]["nodeName"]
        with scene.survives():
            scene.fault.set_gpu(node, _GPU, "failed")
            wait_for(f"loss of the GPU of {node}", 60, lambda: _gpus(scene, node) == 0, every=0.3)
            wait_for(f"healing of {node}", 300, lambda: _gpus(scene, node) == 1 and _takes_pods(scene, node), every=0.5)


def gpu_lost_for_good(scene: Scene) -> None:
    """A new device plugin does not find it either: the operator drains the node and gives it back; another is there."""
    times = ("settings.healAfterSeconds=5", "settings.healStepSeconds=15", "settings.healDrainSeconds=60")
    scene.machine("another node").add_node(_SPARE_WITH_A_GPU)
    with scene.operator.with_values(*HEALING, *times):
        node = scene.job.pods("workers")[0]["spec"]["nodeName"]
        with scene.survives("workerLost", loses=1):
            scene.fault.set_gpu(node, _GPU, "lost")
            wait_for(f"the end of {node}", 300, lambda: not _is_there(scene, node), every=0.5)
    scene.fault.set_gpu(node, _GPU, "healthy")
    scene.fault.crash_node(node)
    scene.fault.start_node(node)


def _is_there(scene: Scene, node: str) -> bool:
    return bool(scene.cluster.kubectl("get", "node", node, "--ignore-not-found"))


def _gpus(scene: Scene, node: str) -> int:
    return int(scene.cluster.kubectl.get("node", node)["status"]["allocatable"].get(_RESOURCE, 0))


def _takes_pods(scene: Scene, node: str) -> bool:
    return not scene.cluster.kubectl.get("node", node)["spec"].get("unschedulable", False)
