"""The RayCluster: a head with the supervisor beside it, and its groups of workers; for KubeRay 1.5.1 or newer."""

from dataclasses import dataclass
from typing import Any, Final

from spotune_operator.children.pods import Pod, head_pod, worker_capacities, worker_pod
from spotune_operator.children.resolved_job import PlacedJob
from spotune_operator.children.resources import whole_cpus
from spotune_operator.providers import Capacity

WORKER_GROUP: Final = "workers"
"""The group that every job has: on spot nodes unless ``workers.capacity`` is on-demand."""
ON_DEMAND_GROUP: Final = "on-demand"
"""The second group of a job with spot-then-on-demand, for as long as spot nodes cannot be had."""
_OBJECT_STORE_BYTES = 100 * 2**20
"""Little more than Ray's minimum: models and data never go through the object store, and /dev/shm is NCCL's."""
_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_KUEUE_ELASTIC = "kueue.x-k8s.io/elastic-job"


@dataclass(frozen=True)
class Replicas:
    """Worker pods wanted now.

    Attributes:
        workers: In the group that every job has; 0 while data is being prepared.
        on_demand: In the second group; passed over for a job that has none.
    """

    workers: int
    on_demand: int = 0


def ray_cluster(placed: PlacedJob, replicas: Replicas) -> dict[str, Any]:
    """A RayCluster with so many worker pods.

    Scaling changes ``replicas`` alone, so that a head or a worker that runs is never touched by it.

    Raises:
        StalledError: A pod template or the resources cannot be.
    """
    cluster = ray_cluster_without_spec(placed)
    groups = zip((WORKER_GROUP, ON_DEMAND_GROUP), (replicas.workers, replicas.on_demand), strict=True)
    cluster["spec"] = {
        "rayVersion": placed.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # Without CPUs, or the driver may put a worker here.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_object_store()},  # noqa: S104 - NetworkPolicy
            "template": head_pod(placed).template,
        },
        "workerGroupSpecs": [
            _worker_group(placed, name, capacity, pods)
            for capacity, (name, pods) in zip(worker_capacities(placed), groups, strict=False)
        ],
    }
    return cluster


def ray_cluster_without_spec(placed: PlacedJob) -> dict[str, Any]:
    """Version, kind and metadata of the RayCluster.

    ``spec.suspend`` is the caller's. To end a suspension KubeRay has to be told false: a cluster that is suspended
    stays so while the field is missing. But a cluster in a queue belongs to Kueue in these (Kueue's "Run A RayCluster"
    and "Elastic Workloads", and its pkg/controller/jobframework/reconciler.go):

    - ``spec.suspend`` must never be applied. Kueue sets true when it is created and false when it is admitted, and each
      time that it finds another value: an admitted cluster goes on whoever suspends it, one that waits is suspended
      whoever starts it. To free the pods of such a job its RayCluster is deleted; when it comes back it waits again.
    - A change of ``replicas`` suspends all of it, head included, and queues it again, unless it is an elastic job: the
      annotation (RayCluster: Kueue 0.14, there behind the feature gate ElasticJobsViaWorkloadSlices; on by default from
      0.18) lets it grow and shrink, with pods that wait for quota held back by a scheduling gate. It cannot be changed
      later, and neither can the queue of a cluster that runs.
    - On admission Kueue adds its flavor's labels to ``nodeSelector``, and tolerations: node selectors are merged with
      ours, of the tolerations those applied last remain. No group may be named head.
    """
    cluster = placed.child("ray.io/v1", "RayCluster", "cluster")
    if queue := placed.job.spec.cluster.queue_name:
        cluster["metadata"]["labels"][_KUEUE_QUEUE] = queue
        cluster["metadata"]["annotations"] = {_KUEUE_ELASTIC: "true"}
    return cluster


def _worker_group(placed: PlacedJob, name: str, capacity: Capacity, replicas: int) -> dict[str, Any]:
    worker = worker_pod(placed, capacity)
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": placed.job.spec.workers.count,
        "rayStartParams": _worker_parameters(placed, worker),
        "template": worker.template,
    }


def _worker_parameters(placed: PlacedJob, worker: Pod) -> dict[str, str]:
    """Parameters of ``ray start``. A worker without GPUs has one CPU for Ray, because it is one worker process."""
    gpus = placed.job.spec.workers.gpus
    cpus = max(whole_cpus(worker.resources), gpus) if gpus else 1
    return {"num-cpus": str(cpus), "num-gpus": str(gpus), **_object_store()}


def _object_store() -> dict[str, str]:
    return {"object-store-memory": str(_OBJECT_STORE_BYTES)}
