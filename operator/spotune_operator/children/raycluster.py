"""The RayCluster: the head with the supervisor beside it, and the worker groups; for KubeRay 1.5.1 or newer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune.job import PoolSpec
from spotune.job.pools import GPU_TYPE_RESOURCE
from spotune_operator.children.pod_template.layers import Pod
from spotune_operator.children.pod_template.ray_pods import head_start_parameters, object_store_parameters
from spotune_operator.children.pod_template.resources import whole_cpus
from spotune_operator.children.pods import head_pod, worker_capacities, worker_pod
from spotune_operator.children.resolved_job import ResolvedJob
from spotune_operator.kueue.names import ELASTIC_ANNOTATION, PRIORITY_LABEL, QUEUE_LABEL

WORKER_GROUP: Final = "workers"
"""The worker group of every job: on spot nodes, unless ``workers.capacity`` is on-demand."""
ON_DEMAND_GROUP: Final = "on-demand"
"""The second worker group with spot-then-on-demand: used while there are not enough spot nodes."""


@dataclass(frozen=True)
class Replicas:
    """The desired number of worker pods.

    Attributes:
        workers: In the first group; 0 while data is being prepared.
        on_demand: In the second group; ignored without one.
        pools: With ``workers.pools``: in the group of each pool.
        leaving: Names of the pods of a group that KubeRay is to delete. Otherwise it deletes any of the group.
    """

    workers: int
    on_demand: int = 0
    pools: Mapping[str, int] = field(default_factory=dict)
    leaving: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """In all groups, with pools or without."""
        return sum(self.pools.values()) if self.pools else self.workers + self.on_demand

    def scale(self, group: dict[str, Any], count: int) -> None:
        """Write the number of pods into a group of the RayCluster; `count` is ``workers.count``."""
        name = group["groupName"]
        if name in self.pools:
            group["replicas"] = self.pools[name]
        else:
            group["replicas"] = self.on_demand if name == ON_DEMAND_GROUP else self.workers
        group["maxReplicas"] = max(count, group["replicas"])
        if leaving := self.leaving.get(name):
            group["scaleStrategy"] = {"workersToDelete": [*leaving]}


def ray_cluster(resolved: ResolvedJob, replicas: Replicas) -> dict[str, Any]:
    """The RayCluster with this number of worker pods.

    Scaling changes nothing but ``replicas``, so it never touches a running pod.

    Raises:
        StalledError: A pod template or the resources are invalid.
    """
    cluster = ray_cluster_without_spec(resolved)
    cluster["spec"] = {
        "rayVersion": resolved.ray_version,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": head_start_parameters(),
            "template": head_pod(resolved).template,
        },
        "workerGroupSpecs": _worker_groups(resolved, replicas),
    }
    return cluster


def ray_cluster_without_spec(resolved: ResolvedJob) -> dict[str, Any]:
    """API version, kind and metadata of the RayCluster.

    The caller sets ``spec.suspend``. To resume a suspended cluster it must be false: KubeRay keeps a cluster suspended
    while the field is missing. For a cluster in a queue of Kueue, Kueue owns some fields (Kueue's "Run A RayCluster"
    and "Elastic Workloads", and its pkg/controller/jobframework/reconciler.go):

    - ``spec.suspend`` must never be applied. Kueue sets it to true on creation and to false on admission, and resets
      every other value: nobody else can suspend an admitted cluster, or start one that waits. To delete the pods of
      such a job, its RayCluster is deleted; when it is created again, it waits in the queue again.
    - A change of ``replicas`` suspends the whole cluster, head included, and queues it again, unless it is an elastic
      job. The annotation makes it one (RayCluster: Kueue 0.14, behind the feature gate ElasticJobsViaWorkloadSlices; on
      by default from 0.18): it can grow and shrink, and a scheduling gate holds back pods that wait for quota. Neither
      the annotation nor the queue of a running cluster can be changed later.
    - On admission Kueue writes into the templates of worker groups, so an existing RayCluster is only scaled
      (``kueue/scaling.py`` has why). No group may be named head.
    """
    cluster = resolved.child("ray.io/v1", "RayCluster", "cluster")
    settings = resolved.job.spec.cluster
    if settings.queue_name:
        cluster["metadata"]["labels"][QUEUE_LABEL] = settings.queue_name
        cluster["metadata"]["annotations"] = {ELASTIC_ANNOTATION: "true"}
        if settings.queue_priority_class:
            cluster["metadata"]["labels"][PRIORITY_LABEL] = settings.queue_priority_class
    return cluster


def _worker_groups(resolved: ResolvedJob, replicas: Replicas) -> list[dict[str, Any]]:
    """The group of each pool or, without pools, of each capacity type.

    Raises:
        StalledError: A pod template is invalid.
    """
    pools = resolved.job.spec.workers.pools
    if not pools:
        capacities = zip((WORKER_GROUP, ON_DEMAND_GROUP), worker_capacities(resolved), strict=False)
        groups = [_worker_group(resolved, name, worker_pod(resolved, capacity)) for name, capacity in capacities]
    else:
        groups = [_pool_group(resolved, pool) for pool in pools]
    for group in groups:
        replicas.scale(group, resolved.job.spec.workers.count)
    return groups


def _worker_group(resolved: ResolvedJob, name: str, worker: Pod) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": 0,
        "rayStartParams": _worker_parameters(resolved, worker),
        "template": worker.template,
    }


def _pool_group(resolved: ResolvedJob, pool: PoolSpec) -> dict[str, Any]:
    """The group of a pool. Its GPU type is a resource of Ray, by which the driver keeps groups of one type."""
    group = _worker_group(resolved, pool.name, worker_pod(resolved, pool.capacity, pool))
    if pool.gpu_type and not resolved.job.spec.workers.mix_gpu_types:
        resources = json.dumps({f"{GPU_TYPE_RESOURCE}{pool.gpu_type}": 1}, separators=(",", ":"))
        group["rayStartParams"]["resources"] = f"'{resources}'"  # KubeRay passes it to a shell
    return group


def _worker_parameters(resolved: ResolvedJob, worker: Pod) -> dict[str, str]:
    """Parameters of ``ray start``. A worker without GPUs has one CPU in Ray, because it runs one process."""
    gpus = resolved.job.spec.workers.gpus
    cpus = max(whole_cpus(worker.resources), gpus) if gpus else 1
    return {"num-cpus": str(cpus), "num-gpus": str(gpus), **object_store_parameters()}
