"""The RayCluster: a head with the supervisor beside it, and a group of workers; for KubeRay 1.5.1 or newer."""

from typing import Any, Final

from spotune_operator.children.pods import Pod, head_pod, worker_pod
from spotune_operator.children.resources import whole_cpus
from spotune_operator.placed_job import PlacedJob

WORKER_GROUP: Final = "workers"
_OBJECT_STORE_BYTES = 100 * 2**20
"""Little more than Ray's minimum: models and data never go through the object store, and /dev/shm is NCCL's."""
_KUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def ray_cluster(placed: PlacedJob, workers: int) -> dict[str, Any]:
    """A RayCluster with ``workers`` worker pods.

    Scaling changes ``replicas`` alone, so that a head or a worker that runs is never touched by it.

    Raises:
        StalledError: A pod template or the resources cannot be.
    """
    cluster = placed.child("ray.io/v1", "RayCluster", "cluster")
    queue = placed.job.spec.cluster.queue_name
    if queue:
        cluster["metadata"]["labels"][_KUEUE_LABEL] = queue
    head, worker = head_pod(placed), worker_pod(placed)
    cluster["spec"] = {
        "rayVersion": placed.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # Without CPUs, or Ray Train may put a worker here.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_object_store()},  # noqa: S104 - NetworkPolicy
            "template": head.template,
        },
        "workerGroupSpecs": [
            {
                "groupName": WORKER_GROUP,
                "replicas": workers,
                "minReplicas": 0,
                "maxReplicas": placed.job.spec.workers.count,
                "rayStartParams": _worker_parameters(placed, worker),
                "template": worker.template,
            }
        ],
    }
    return cluster


def _worker_parameters(placed: PlacedJob, worker: Pod) -> dict[str, str]:
    """Parameters of ``ray start``. A worker without GPUs has one CPU for Ray, because it is one worker process."""
    gpus = placed.job.spec.workers.gpus
    cpus = max(whole_cpus(worker.resources), gpus) if gpus else 1
    return {"num-cpus": str(cpus), "num-gpus": str(gpus), **_object_store()}


def _object_store() -> dict[str, str]:
    return {"object-store-memory": str(_OBJECT_STORE_BYTES)}
