"""Pod templates of head and workers, in three layers: defaults, the user's template over them, and what we own on top.

What we own is what the promises rest on: where pods run, how long they have to leave, the volume, the supervisor, and
the settings by which Ray finds a lost head or worker quickly. Everything else is a default that a template changes.
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
from spotune_operator.children.resolved_job import DATA, PlacedJob
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
"""Nothing on the head is worth waiting for: a lost head heals the sooner the sooner it is gone."""
ON_DEMAND_GRACE_SECONDS = 120
"""Time for a last commit where no machine is about to go."""
DRAIN_MARGIN_SECONDS = 5
"""From the end of Ray's draining to SIGKILL: for Ray to say goodbye."""
LOST_NODE_SECONDS = 20
"""A pod on a node that is lost is given up after this time, in place of 300 s."""
_CONFIG = "/etc/spotune"
_USER = 1000
_HEAD_LOSS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}
"""With these a worker notices a lost head in seconds (by default up to a minute) and joins the new one."""
_WORKER_LOSS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""With these the head gives up a worker whose machine is gone after a quarter of a minute (by default half of one)."""
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

HeadOrWorkers = Literal["head", "workers"]


@dataclass(frozen=True)
class Pod:
    """A pod template with the resources of its Ray container."""

    template: dict[str, Any]
    resources: Amounts


def head_pod(placed: PlacedJob) -> Pod:
    """The head: Ray's control plane and driver, and the supervisor beside it.

    Raises:
        StalledError: The pod template or the resources cannot be.
    """
    amounts = _resources(placed, "head", HEAD_CONTAINER, HEAD)
    # KubeRay's head Service has the ports of the first container only, so the supervisor's is named here.
    ray = _ray_container(placed, HEAD_CONTAINER, (GCS, DASHBOARD, METRICS, PROGRESS), _WORKER_LOSS)
    owned = _owned(placed, placed.job.spec.head.capacity, gpus=False, grace_seconds=HEAD_GRACE_SECONDS)
    owned["containers"] = [ray | {"resources": amounts}, _supervisor(placed)]
    owned["volumes"].append({"name": "job", "configMap": {"name": placed.name}})
    return Pod(_template(placed, "head", (HEAD_CONTAINER, SUPERVISOR_CONTAINER), owned, amounts), amounts)


def worker_capacities(placed: PlacedJob) -> tuple[Capacity, ...]:
    """The kinds of nodes that workers run on; on the second, if there is one, while the first cannot be had."""
    wanted = placed.job.spec.workers.capacity
    return ("spot", "on-demand") if wanted == "spot-then-on-demand" else (wanted,)


def worker_pod(placed: PlacedJob, capacity: Capacity) -> Pod:
    """A worker on nodes of one kind: Ray, and the training processes of its GPUs.

    Raises:
        StalledError: The pod template or the resources cannot be.
    """
    workers = placed.job.spec.workers
    amounts = _resources(placed, "workers", WORKER_CONTAINER, worker_defaults(workers.gpus))
    grace = _grace_seconds(placed, capacity)
    settings = {
        "SPOTUNE_CAPACITY": capacity,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(grace - DRAIN_MARGIN_SECONDS),
        **_HEAD_LOSS,
    }
    ray = _ray_container(placed, WORKER_CONTAINER, (METRICS,), settings)
    owned = _owned(placed, capacity, gpus=workers.gpus > 0, grace_seconds=grace)
    owned["containers"] = [ray | {"resources": amounts}]
    return Pod(_template(placed, "workers", (WORKER_CONTAINER,), owned, amounts), amounts)


def _grace_seconds(placed: PlacedJob, capacity: Capacity) -> int:
    """From the notice to SIGKILL, for a worker."""
    return placed.provider.grace_seconds if capacity == "spot" else ON_DEMAND_GRACE_SECONDS


def _template(
    placed: PlacedJob, group: HeadOrWorkers, containers: tuple[str, ...], owned: dict[str, Any], amounts: Amounts
) -> dict[str, Any]:
    """The three layers, merged."""
    place = f"spec.{group}.podTemplate"
    # An empty `spec:` says nothing, it does not take our defaults away.
    given = {name: part for name, part in _section(placed.job.spec, group).pod_template.items() if part is not None}
    for name in sorted(given.keys() - {"metadata", "spec"}):
        raise PodTemplateError(f"{place}.{name}", "is not a field of a pod template, which has metadata and spec")
    defaults = {"metadata": {}, "spec": _defaults(placed, group, containers, shared_memory(amounts))}
    template = merge(defaults, given, place)
    _refuse_nameless_images(template, place)
    labels = placed.labels(group)
    if placed.job.spec.workers.service_account_name:
        labels = labels | dict(placed.provider.workload_identity_labels)
    return merge(template, {"metadata": {"labels": labels}, "spec": owned}, place)


def _refuse_nameless_images(template: Mapping[str, Any], place: str) -> None:
    """Refuse a container without an image: it was meant to be one of ours, under a name that is not ours."""
    ours = {HEAD_CONTAINER, WORKER_CONTAINER, SUPERVISOR_CONTAINER}
    containers = template["spec"].get("containers", [])
    known = [container["name"] for container in containers if container["name"] in ours]
    for container in containers:
        if container["name"] not in known and not container.get("image"):
            reason = f"has no image and is none of spotune's own containers, {' and '.join(known)}"
            raise PodTemplateError(f"{place}.spec.containers[{container['name']}]", reason)


def _defaults(placed: PlacedJob, group: HeadOrWorkers, containers: tuple[str, ...], shm: str) -> dict[str, Any]:
    """The ``v1.PodSpec`` under the user's."""
    lost = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": LOST_NODE_SECONDS}
        for state in ("not-ready", "unreachable")
    ]
    spec: dict[str, Any] = {
        "enableServiceLinks": False,  # a namespace with many Services would fill the environment
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
        spec["affinity"] = _apart(placed)
    return spec


def _container_defaults(name: str) -> dict[str, Any]:
    mounts = [{"name": "cache", "mountPath": CACHE}]
    if name == SUPERVISOR_CONTAINER:
        more: dict[str, Any] = {"resources": SUPERVISOR}
    else:
        more = {}
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a mount of the pod's own
    environment = default_environment()
    return {"name": name, "imagePullPolicy": "IfNotPresent", "env": environment, "volumeMounts": mounts, **more}


def _apart(placed: PlacedJob) -> dict[str, Any]:
    """Workers on different nodes where there are enough: one reclaimed node then takes one of them."""
    term = {
        "labelSelector": {"matchLabels": placed.selector | {"app.kubernetes.io/component": "workers"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _owned(placed: PlacedJob, capacity: Capacity, *, gpus: bool, grace_seconds: int) -> dict[str, Any]:
    """The ``v1.PodSpec`` over the user's, without containers."""
    account = placed.job.spec.workers.service_account_name
    spec: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_seconds,
        "automountServiceAccountToken": bool(account),
        "securityContext": _POD_SECURITY,
        "tolerations": placed.provider.tolerations(capacity, gpus=gpus),
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": placed.claim}}],
    }
    if account:
        spec["serviceAccountName"] = account
    terms = placed.provider.node_selector_terms(capacity)
    if terms:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        spec["affinity"] = {"nodeAffinity": required}
    return spec


def _owned_container(placed: PlacedJob, name: str, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """What is ours in every container; ``envFrom`` is there only if the job names credentials."""
    container: dict[str, Any] = {
        "name": name,
        "image": placed.image,
        "env": [*environment, *job_environment(placed)],
        "volumeMounts": [{"name": "data", "mountPath": str(DATA)}],
        "securityContext": _CONTAINER_SECURITY,
    }
    secrets = credentials(placed)
    return container | ({"envFrom": secrets} if secrets else {})


def _ray_container(
    placed: PlacedJob, name: str, ports: tuple[Port, ...], settings: Mapping[str, str]
) -> dict[str, Any]:
    environment = [variable(key, value) for key, value in settings.items()]
    return _owned_container(placed, name, environment) | {"ports": [port.of_container() for port in ports]}


def _supervisor(placed: PlacedJob) -> dict[str, Any]:
    """Submits the driver to the Ray beside it, for ever, and says how training goes.

    Its liveness probe is generous: a new one goes on where the old one was, but seldom mends what was slow. It has no
    readiness probe: the head is ready when Ray is, whatever becomes of the training.
    """
    notice = _grace_seconds(placed, worker_capacities(placed)[0])  # what a commit has to fit in, on most nodes
    environment = [variable("SPOTUNE_NOTICE_SECONDS", str(notice)), *ray_token(placed)]
    container = _owned_container(placed, SUPERVISOR_CONTAINER, environment)
    container["volumeMounts"].append({"name": "job", "mountPath": _CONFIG, "readOnly": True})
    return container | {
        "command": [
            *("spotune", "supervise", f"{_CONFIG}/{JOB_FILE}", "--directory", str(placed.directory)),
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


def _resources(placed: PlacedJob, group: HeadOrWorkers, container: str, defaults: Mapping[str, str]) -> Amounts:
    section = _section(placed.job.spec, group)
    gpus = placed.job.spec.workers.gpus if group == "workers" else 0
    return ray_resources(
        section.resources, _resources_of(section.pod_template, container), defaults, gpus, f"spec.{group}"
    )


def _resources_of(template: Mapping[str, Any], container: str) -> dict[str, Any]:
    """``resources`` of a container of the user's template; empty where the merge is going to refuse them."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for item in containers if isinstance(containers, list) else []:
        if isinstance(item, dict) and item.get("name") == container and isinstance(item.get("resources"), dict):
            return dict(item["resources"])
    return {}


def _section(spec: FinetuneJobSpec, group: HeadOrWorkers) -> HeadSpec | WorkersSpec:
    return spec.head if group == "head" else spec.workers
