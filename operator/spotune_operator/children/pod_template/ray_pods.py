"""What all Ray pods have in common: security, placement, grace periods, and quick detection of lost machines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from spotune_operator.children.pod_template.environment import CACHE, default_environment
from spotune_operator.providers import Capacity, Provider

HEAD_GRACE_SECONDS: Final = 5
"""Nothing on the head of a service needs a long grace period, and a lost head is replaced only once it is gone."""
ON_DEMAND_GRACE_SECONDS: Final = 120
"""Time on an on-demand node for a last commit, or for running requests."""
DRAIN_MARGIN_SECONDS: Final = 5
"""Seconds from the end of Ray's draining to SIGKILL, for Ray's own shutdown."""
LOST_NODE_SECONDS: Final = 20
"""Seconds after which a pod on a lost node is deleted; Kubernetes' default is 300."""
HEAD_LOSS: Final = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}
"""With these, a worker detects a lost head within seconds (default: up to a minute) and joins the new one."""
WORKER_LOSS: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""With these, the head gives up a worker on a lost machine after 15 s (default: 30 s)."""
CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
_POD_SECURITY: Final[Mapping[str, Any]] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_USER: Final = 1000
_OBJECT_STORE_BYTES: Final = 100 * 2**20
"""Little more than Ray's minimum: the object store holds no models or data, and NCCL needs /dev/shm."""


def grace_seconds(provider: Provider, capacity: Capacity) -> int:
    """Seconds from the notice to SIGKILL, for a pod that has to commit or to finish requests before."""
    return provider.grace_seconds if capacity == "spot" else ON_DEMAND_GRACE_SECONDS


def drain_settings(grace: int) -> dict[str, str]:
    """Variable with which Ray drains its node within the grace period, in seconds, of the pod."""
    return {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(grace - DRAIN_MARGIN_SECONDS)}


def default_pod_spec(
    containers: Sequence[dict[str, Any]], shm: str, spread: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The default ``v1.PodSpec``, below the user's.

    Args:
        containers: The defaults of the containers.
        shm: Size of /dev/shm.
        spread: Labels of the pods that prefer different nodes; None for a pod that is the only one of its kind.
    """
    lost = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": LOST_NODE_SECONDS}
        for state in ("not-ready", "unreachable")
    ]
    spec: dict[str, Any] = {
        "enableServiceLinks": False,  # or every Service of the namespace adds variables
        "securityContext": {
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "tolerations": lost,
        "containers": list(containers),
        "volumes": [
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        ],
    }
    if spread is not None:
        spec["affinity"] = _anti_affinity(spread)
    return spec


def default_container(name: str, *, shm: bool = True) -> dict[str, Any]:
    """The defaults of a container, below the user's; ``shm``: whether it has the large /dev/shm."""
    mounts = [{"name": "cache", "mountPath": CACHE}]
    if shm:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a mount of this pod only
    environment = default_environment()
    return {"name": name, "imagePullPolicy": "IfNotPresent", "env": environment, "volumeMounts": mounts}


def _anti_affinity(spread: Mapping[str, str]) -> dict[str, Any]:
    """A preference for different nodes, so that a reclaimed node takes only one of the pods."""
    term = {"labelSelector": {"matchLabels": dict(spread)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def enforced_pod_spec(
    provider: Provider,
    capacity: Capacity,
    *,
    gpus: bool,
    grace: int,
    volumes: Iterable[dict[str, Any]],
    service_account: str = "",
    restart_policy: str = "Always",
    gpu_type: str = "",
) -> dict[str, Any]:
    """The enforced ``v1.PodSpec``, above the user's, without containers.

    Args:
        provider: Provider of the nodes.
        capacity: Capacity type of the node.
        gpus: Whether the pod runs on a node with GPUs.
        grace: Seconds from SIGTERM to SIGKILL.
        volumes: Volumes of the pod.
        service_account: Name of its service account; empty: it has no token of the API server.
        restart_policy: ``Always`` or ``Never``.
        gpu_type: Type of the node's GPUs, as the provider's label names it; empty: any.
    """
    spec: dict[str, Any] = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": grace,
        "automountServiceAccountToken": bool(service_account),
        "securityContext": _POD_SECURITY,
        "tolerations": provider.tolerations(capacity, gpus=gpus),
        "volumes": list(volumes),
    }
    if service_account:
        spec["serviceAccountName"] = service_account
    terms = provider.node_selector_terms(capacity, gpu_type)
    if terms:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    return spec


def enforced_container(
    name: str, image: str, environment: Iterable[dict[str, Any]], mounts: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """The enforced fields of a container."""
    return {
        "name": name,
        "image": image,
        "env": list(environment),
        "volumeMounts": list(mounts),
        "securityContext": CONTAINER_SECURITY,
    }


def head_start_parameters() -> dict[str, str]:
    """Parameters of ``ray start`` on a head. It has no CPUs, or Ray may schedule worker processes on it."""
    dashboard = {"dashboard-host": "0.0.0.0"}  # noqa: S104 - the NetworkPolicy restricts access
    return {"num-cpus": "0", **dashboard, **object_store_parameters()}


def object_store_parameters() -> dict[str, str]:
    """Parameter of ``ray start`` for the size of the object store."""
    return {"object-store-memory": str(_OBJECT_STORE_BYTES)}
