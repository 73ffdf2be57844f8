"""The RayService: a Ray cluster of head, gateway and replicas with the application on it; for KubeRay 1.5.1 or newer.

A change of a pod template, and with it of the gateway's arguments or the mounted claims, makes KubeRay start another
cluster beside the serving one, switch to it when all applications run there, and delete the old one. A change of the
numbers of pods does not (``group_sizes``), and one of ``serveConfigV2`` alone goes to the running cluster: KubeRay does
not replace it when an application there fails (``shouldPrepareNewCluster`` compares the specs of the clusters alone).
"""

import json
from typing import Any, Final

from spotune.service import PinnedServiceStatus
from spotune_operator.children.pod_template.environment import secret_source
from spotune_operator.children.pod_template.layers import Pod
from spotune_operator.children.pod_template.ray_pods import head_start_parameters, object_store_parameters
from spotune_operator.children.pod_template.resources import whole_cpus
from spotune_operator.children.serving.groups import GroupSize, group_sizes
from spotune_operator.children.serving.pinned import inputs_digest, matching_pin
from spotune_operator.children.serving.pods import autoscaler_options, gateway_pod, replica_pod, service_head_pod
from spotune_operator.children.serving.resolved_service import ResolvedService
from spotune_operator.children.serving.serve_config import serve_arguments, serve_config
from spotune_operator.kube.digest import digest

GATEWAY_RESOURCE: Final = "spotune_gateway"
REPLICA_RESOURCE: Final = "spotune_replica"
"""Ray resources of which each pod has one: ``spotune_serve`` starts one gateway or replica for each."""
SPEC_ANNOTATION: Final = "spotune.dev/spec"
"""Annotation of the RayService with a hash of its spec: it shows whether the newest spec was applied."""
CLUSTER_ANNOTATION: Final = "spotune.dev/cluster"
"""Annotation of the RayService with the ``cluster_digest``."""
_MIN_DELETION_DELAY_SECONDS: Final = 60
"""Time for the operator to direct the Service to the new cluster; KubeRay's own default."""


def ray_service(resolved: ResolvedService) -> dict[str, Any]:
    """The RayService.

    The old cluster of an upgrade is kept until the last of its requests has ended or timed out.

    Raises:
        StalledError: A pod template or the resources are invalid.
    """
    spec: dict[str, Any] = {
        "serveConfigV2": serve_config(resolved),
        "upgradeStrategy": {"type": "NewCluster"},
        "rayClusterDeletionDelaySeconds": max(_MIN_DELETION_DELAY_SECONDS, resolved.request_timeout_seconds),
        "excludeHeadPodFromServeSvc": True,
        "rayClusterConfig": _cluster(resolved),
    }
    manifest = resolved.owner.child("ray.io/v1", "RayService", "cluster")
    annotations = {SPEC_ANNOTATION: digest(spec), CLUSTER_ANNOTATION: _digest_without_sizes(spec["rayClusterConfig"])}
    manifest["metadata"]["annotations"] = annotations
    return manifest | {"spec": spec}


def cluster_digest(resolved: ResolvedService) -> str:
    """Changes when KubeRay will start another cluster.

    Raises:
        StalledError: A pod template or the resources are invalid.
    """
    return _digest_without_sizes(_cluster(resolved))


def pin(resolved: ResolvedService) -> PinnedServiceStatus:
    """The pin unchanged, or a new one if a field has changed that the pods depend on.

    Raises:
        StalledError: A pod template or the resources are invalid.
    """
    return matching_pin(resolved) or PinnedServiceStatus(
        inputs=inputs_digest(resolved),
        ray_cluster=_compact(_without_sizes(_rendered_cluster(resolved))),
        arguments=_compact(serve_arguments(resolved)),
    )


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _digest_without_sizes(cluster: dict[str, Any]) -> str:
    return digest(_without_sizes(cluster))


def _without_sizes(cluster: dict[str, Any]) -> dict[str, Any]:
    sizes = ("replicas", "minReplicas", "maxReplicas")
    groups = [
        {name: value for name, value in group.items() if name not in sizes} for group in cluster["workerGroupSpecs"]
    ]
    return cluster | {"workerGroupSpecs": groups}


def _cluster(resolved: ResolvedService) -> dict[str, Any]:
    """The spec of the RayCluster: as pinned, with the numbers of pods of now; else rendered."""
    pinned = matching_pin(resolved)
    if pinned is None:
        return _rendered_cluster(resolved)
    cluster: dict[str, Any] = json.loads(pinned.ray_cluster)
    numbers = {size.name: _numbers(size) for size in group_sizes(resolved)}
    groups = [group | numbers[group["groupName"]] for group in cluster["workerGroupSpecs"]]
    return cluster | {"workerGroupSpecs": groups}


def _rendered_cluster(resolved: ResolvedService) -> dict[str, Any]:
    autoscales = resolved.service.spec.replicas.autoscales
    optional = {
        "autoscalerOptions": autoscaler_options() if autoscales else {},
        "gcsFaultToleranceOptions": _fault_tolerance(resolved),
    }
    return {
        "rayVersion": resolved.ray_version,
        "enableInTreeAutoscaling": autoscales,
        "authOptions": {"mode": "token"},
        **{name: options for name, options in optional.items() if options},
        "headGroupSpec": {
            "rayStartParams": head_start_parameters(),
            "template": service_head_pod(resolved).template,
        },
        "workerGroupSpecs": _groups(resolved),
    }


def _groups(resolved: ResolvedService) -> list[dict[str, Any]]:
    gateway, *replicas = group_sizes(resolved)
    gpus = resolved.service.spec.gpus
    return [
        _group(gateway, gateway_pod(resolved), GATEWAY_RESOURCE, 0),
        *(_group(size, replica_pod(resolved, size.capacity), REPLICA_RESOURCE, gpus) for size in replicas),
    ]


def _group(size: GroupSize, pod: Pod, resource: str, gpus: int) -> dict[str, Any]:
    parameters = {
        "num-cpus": str(whole_cpus(pod.resources)),
        "num-gpus": str(gpus),
        "resources": f"'{json.dumps({resource: 1})}'",  # quoted, because KubeRay writes it into a shell command
        **object_store_parameters(),
    }
    return {
        "groupName": size.name,
        **_numbers(size),
        "rayStartParams": parameters,
        "template": pod.template,
    }


def _numbers(size: GroupSize) -> dict[str, int]:
    """The numbers of pods of a group."""
    return {"replicas": size.min, "minReplicas": size.min, "maxReplicas": size.max}


def _fault_tolerance(resolved: ResolvedService) -> dict[str, Any]:
    """``gcsFaultToleranceOptions``: Ray's control plane keeps its state in Redis; empty without Redis."""
    cluster = resolved.service.spec.cluster
    if not cluster.redis_address:
        return {}
    password = cluster.redis_password_secret_ref
    options: dict[str, Any] = {"redisAddress": cluster.redis_address}
    if password is not None:
        options["redisPassword"] = {"valueFrom": secret_source(password)}
    return options
