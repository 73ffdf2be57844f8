"""The pod templates of head and workers, in three layers: defaults, the user's template, enforced fields.

The product's promises depend on the enforced fields: placement, grace period, volume, supervisor, and the settings with
which Ray detects a lost head or worker quickly. All other fields are defaults that the user's template overrides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from spotune.job import FinetuneJobSpec
from spotune.job.cluster import HeadSpec, WorkersSpec
from spotune_operator.children.config import JOB_FILE
from spotune_operator.children.environment import (
    CACHE,
    credentials,
    default_environment,
    job_environment,
    ray_token,
    variable,
)
from spotune_operator.children.ports import DASHBOARD, GCS, METRICS, PROGRESS, Port
from spotune_operator.children.resolved_job import DATA, ResolvedJob
from spotune_operator.children.resources import (
    HEAD,
    SUPERVISOR,
    Amounts,
    ray_resources,
    shared_memory,
    worker_defaults,
)
from spotune_operator.children.strategic_merge import merge
from spotune_operator.errors import PodTemplateError
from spotune_operator.providers import Capacity

HEAD_CONTAINER: Final = "ray-head"
WORKER_CONTAINER: Final = "ray-worker"
SUPERVISOR_CONTAINER: Final = "supervisor"

HEAD_GRACE_SECONDS = 5
"""Nothing on the head needs a long grace period, and a lost head is replaced only once it is gone."""
ON_DEMAND_GRACE_SECONDS = 120
"""Time for a last commit on an on-demand node."""
DRAIN_MARGIN_SECONDS = 5
"""Seconds from the end of Ray's draining to SIGKILL, for Ray's own shutdown."""
LOST_NODE_SECONDS = 20
"""Seconds after which a pod on a lost node is deleted; Kubernetes' default is 300."""
_CONFIG = "/etc/spotune"
_USER = 1000
_HEAD_LOSS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}
"""With these, a worker detects a lost head within seconds (default: up to a minute) and joins the new one."""
_WORKER_LOSS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""With these, the head gives up a worker on a lost machine after 15 s (default: 30 s)."""
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

HeadOrWorkers = Literal["head", "workers"]


@dataclass(frozen=True)
class Pod:
    """A pod template, and the resources of its Ray container."""

    template: dict[str, Any]
    resources: Amounts


def head_pod(resolved: ResolvedJob) -> Pod:
    """The pod template of the head: Ray's control plane and the driver, with the supervisor beside them.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    amounts = _resources(resolved, "head", HEAD_CONTAINER, HEAD)
    # KubeRay's head Service has only the ports of the first container, so this one names the supervisor's port.
    ray = _ray_container(resolved, HEAD_CONTAINER, (GCS, DASHBOARD, METRICS, PROGRESS), _WORKER_LOSS)
    enforced = _enforced_spec(resolved, resolved.job.spec.head.capacity, gpus=False, grace_seconds=HEAD_GRACE_SECONDS)
    enforced["containers"] = [ray | {"resources": amounts}, _supervisor(resolved)]
    enforced["volumes"].append({"name": "job", "configMap": {"name": resolved.name}})
    return Pod(_template(resolved, "head", (HEAD_CONTAINER, SUPERVISOR_CONTAINER), enforced, amounts), amounts)


def worker_capacities(resolved: ResolvedJob) -> tuple[Capacity, ...]:
    """The capacity type of each worker group; a second group is used while the first type is not available."""
    capacity = resolved.job.spec.workers.capacity
    return ("spot", "on-demand") if capacity == "spot-then-on-demand" else (capacity,)


def worker_pod(resolved: ResolvedJob, capacity: Capacity) -> Pod:
    """The pod template of a worker on nodes of one capacity type: Ray, and one training process a GPU.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    workers = resolved.job.spec.workers
    amounts = _resources(resolved, "workers", WORKER_CONTAINER, worker_defaults(workers.gpus))
    grace = _grace_seconds(resolved, capacity)
    settings = {
        "SPOTUNE_CAPACITY": capacity,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(grace - DRAIN_MARGIN_SECONDS),
        **_HEAD_LOSS,
    }
    ray = _ray_container(resolved, WORKER_CONTAINER, (METRICS,), settings)
    enforced = _enforced_spec(resolved, capacity, gpus=workers.gpus > 0, grace_seconds=grace)
    enforced["containers"] = [ray | {"resources": amounts}]
    return Pod(_template(resolved, "workers", (WORKER_CONTAINER,), enforced, amounts), amounts)


def _grace_seconds(resolved: ResolvedJob, capacity: Capacity) -> int:
    """Seconds from the notice to SIGKILL, for a worker."""
    return resolved.provider.grace_seconds if capacity == "spot" else ON_DEMAND_GRACE_SECONDS


def _template(
    resolved: ResolvedJob, group: HeadOrWorkers, containers: tuple[str, ...], enforced: dict[str, Any], amounts: Amounts
) -> dict[str, Any]:
    """The pod template, merged of the three layers."""
    path = f"spec.{group}.podTemplate"
    # An empty `spec:` is null in YAML. It must not remove the defaults.
    given = {name: part for name, part in _section(resolved.job.spec, group).pod_template.items() if part is not None}
    for name in sorted(given.keys() - {"metadata", "spec"}):
        raise PodTemplateError(f"{path}.{name}", "is not a field of a pod template: use metadata and spec")
    defaults = {"metadata": {}, "spec": _defaults(resolved, group, containers, shared_memory(amounts))}
    template = merge(defaults, given, path)
    _refuse_missing_images(template, path)
    labels = resolved.labels(group)
    if resolved.job.spec.workers.service_account_name:
        labels = labels | dict(resolved.provider.workload_identity_labels)
    return merge(template, {"metadata": {"labels": labels}, "spec": enforced}, path)


def _refuse_missing_images(template: Mapping[str, Any], path: str) -> None:
    """Refuse a container without an image: its name is probably a misspelt name of one of spotune's containers."""
    own_names = {HEAD_CONTAINER, WORKER_CONTAINER, SUPERVISOR_CONTAINER}
    containers = template["spec"].get("containers", [])
    known = [container["name"] for container in containers if container["name"] in own_names]
    for container in containers:
        if container["name"] not in known and not container.get("image"):
            names = " and ".join(known)
            reason = (
                f"has no image, and is not one of spotune's containers ({names}): give an image or correct the name"
            )
            raise PodTemplateError(f"{path}.spec.containers[{container['name']}]", reason)


def _defaults(resolved: ResolvedJob, group: HeadOrWorkers, containers: tuple[str, ...], shm: str) -> dict[str, Any]:
    """The default ``v1.PodSpec``, below the user's."""
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
        "containers": [_container_defaults(name) for name in containers],
        "volumes": [
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        ],
    }
    if group == "workers":
        spec["affinity"] = _anti_affinity(resolved)
    return spec


def _container_defaults(name: str) -> dict[str, Any]:
    mounts = [{"name": "cache", "mountPath": CACHE}]
    if name == SUPERVISOR_CONTAINER:
        more: dict[str, Any] = {"resources": SUPERVISOR}
    else:
        more = {}
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a mount of this pod only
    environment = default_environment()
    return {"name": name, "imagePullPolicy": "IfNotPresent", "env": environment, "volumeMounts": mounts, **more}


def _anti_affinity(resolved: ResolvedJob) -> dict[str, Any]:
    """A preference for workers on different nodes, so that a reclaimed node takes only one of them."""
    term = {
        "labelSelector": {"matchLabels": resolved.selector | {"app.kubernetes.io/component": "workers"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _enforced_spec(resolved: ResolvedJob, capacity: Capacity, *, gpus: bool, grace_seconds: int) -> dict[str, Any]:
    """The enforced ``v1.PodSpec``, above the user's, without containers."""
    account = resolved.job.spec.workers.service_account_name
    spec: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_seconds,
        "automountServiceAccountToken": bool(account),
        "securityContext": _POD_SECURITY,
        "tolerations": resolved.provider.tolerations(capacity, gpus=gpus),
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": resolved.claim}}],
    }
    if account:
        spec["serviceAccountName"] = account
    terms = resolved.provider.node_selector_terms(capacity)
    if terms:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    return spec


def _enforced_container(resolved: ResolvedJob, name: str, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """The enforced fields of every container; ``envFrom`` only if the job names credentials."""
    container: dict[str, Any] = {
        "name": name,
        "image": resolved.image,
        "env": [*environment, *job_environment(resolved)],
        "volumeMounts": [{"name": "data", "mountPath": str(DATA)}],
        "securityContext": _CONTAINER_SECURITY,
    }
    secrets = credentials(resolved)
    return container | ({"envFrom": secrets} if secrets else {})


def _ray_container(
    resolved: ResolvedJob, name: str, ports: tuple[Port, ...], settings: Mapping[str, str]
) -> dict[str, Any]:
    environment = [variable(key, value) for key, value in settings.items()]
    return _enforced_container(resolved, name, environment) | {"ports": [port.of_container() for port in ports]}


def _supervisor(resolved: ResolvedJob) -> dict[str, Any]:
    """The supervisor container: it submits drivers to the Ray beside it until the model is trained.

    Its liveness probe is generous: a restart loses no state, but rarely cures slowness. It has no readiness probe: the
    head is ready when Ray is ready, independently of the training.
    """
    notice = _grace_seconds(resolved, worker_capacities(resolved)[0])  # the time for a commit on most nodes
    environment = [variable("SPOTUNE_NOTICE_SECONDS", str(notice)), *ray_token(resolved)]
    container = _enforced_container(resolved, SUPERVISOR_CONTAINER, environment)
    container["volumeMounts"].append({"name": "job", "mountPath": _CONFIG, "readOnly": True})
    return container | {
        "command": [
            *("spotune", "supervise", f"{_CONFIG}/{JOB_FILE}", "--directory", str(resolved.directory)),
            *("--ray", f"http://127.0.0.1:{DASHBOARD.number}", "--serve", f"0.0.0.0:{PROGRESS.number}"),
        ],
        "args": [],
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": PROGRESS.number},
            "initialDelaySeconds": 60,
            "periodSeconds": 20,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
    }


def _resources(resolved: ResolvedJob, group: HeadOrWorkers, container: str, defaults: Mapping[str, str]) -> Amounts:
    section = _section(resolved.job.spec, group)
    gpus = resolved.job.spec.workers.gpus if group == "workers" else 0
    return ray_resources(
        section.resources, _resources_of(section.pod_template, container), defaults, gpus, f"spec.{group}"
    )


def _resources_of(template: Mapping[str, Any], container: str) -> dict[str, Any]:
    """``resources`` of a container in the user's template; empty if they are malformed, which the merge refuses."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for item in containers if isinstance(containers, list) else []:
        if isinstance(item, dict) and item.get("name") == container and isinstance(item.get("resources"), dict):
            return dict(item["resources"])
    return {}


def _section(spec: FinetuneJobSpec, group: HeadOrWorkers) -> HeadSpec | WorkersSpec:
    return spec.head if group == "head" else spec.workers
