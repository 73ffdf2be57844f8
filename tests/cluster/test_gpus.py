"""Fake GPUs with a real device plugin and a real kubelet: a GPU is lost and comes back."""

from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.waiting import wait_for
from tests.cluster.pods import events, pod, run_in, wait_until_running

pytestmark = pytest.mark.cluster

GPU = "nvidia.com/gpu"


def _gpu_pod(cluster: ClusterUnderTest, name: str) -> dict[str, Any]:
    return pod(name, cluster.image, node="n2", limits={GPU: "1"})


def _wait_for_gpus(cluster: ClusterUnderTest, count: str) -> None:
    def counted() -> bool:
        allocatable: dict[str, str] = cluster.kubectl.get("node", "n2")["status"]["allocatable"]
        return allocatable.get(GPU) == count

    wait_for(f"{count} GPUs on n2", 60, counted, every=0.3)


@pytest.mark.long
def test_pod_gets_the_gpu_until_the_plugin_loses_it(
    cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault
) -> None:
    cluster.machine_for("a fake GPU")
    _wait_for_gpus(cluster, "1")
    namespace.apply(_gpu_pod(cluster, "first"))
    wait_until_running(namespace, "first")
    assert run_in(namespace, "first", "printenv", "NVIDIA_VISIBLE_DEVICES") == "GPU-0\n"
    namespace("delete", "pod", "first")

    fault.set_gpu("n2", "GPU-0", "lost")
    _wait_for_gpus(cluster, "0")
    namespace.apply(_gpu_pod(cluster, "second"))
    said = wait_for("the scheduler's words", 30, lambda: events(namespace, "second"), every=0.3)
    assert any(f"Insufficient {GPU}" in line for line in said), said
    assert namespace.get("pod", "second")["status"]["phase"] == "Pending"

    fault.set_gpu("n2", "GPU-0", "healthy")
    plugin = "--selector=name=nvidia-device-plugin-ds"
    cluster.kubectl("delete", "pods", "--namespace=kube-system", plugin, "--field-selector=spec.nodeName=n2")
    wait_until_running(namespace, "second")
