"""The pod templates of a job's head and workers.

The product's promises depend on the enforced fields: placement, grace period, volume, supervisor, and the settings with
which Ray detects a lost head or worker quickly. All other fields are defaults that the user's template overrides.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from spotune.custom_resource.object_names import DATA_VOLUME as DATA_VOLUME
from spotune.custom_resource.object_names import HEAD_CONTAINER, WORKER_CONTAINER
from spotune.custom_resource.object_names import SUPERVISOR_CONTAINER as SUPERVISOR_CONTAINER
from spotune.job import PoolSpec
from spotune_operator.children.config import JOB_FILE
from spotune_operator.children.environment import CODE_FOLDER, code_environment, credentials, job_environment, ray_token
from spotune_operator.children.pod_template.environment import variables
from spotune_operator.children.pod_template.layers import (
    Pod,
    PodSection,
    container_resources,
    merged_template,
)
from spotune_operator.children.pod_template.ray_pods import (
    DRAIN_MARGIN_SECONDS,
    HEAD_LOSS,
    WORKER_LOSS,
    default_container,
    default_pod_spec,
    drain_settings,
    enforced_container,
    enforced_pod_spec,
    grace_seconds,
)
from spotune_operator.children.pod_template.resources import HEAD, SUPERVISOR, Amounts, shared_memory, worker_defaults
from spotune_operator.children.ports import DASHBOARD, GCS, METRICS, PROGRESS, Port
from spotune_operator.children.resolved_job import DATA, ResolvedJob
from spotune_operator.providers import Capacity

_CONFIG: Final = "/etc/spotune"
_STOP_AFTER_SUPERVISOR: Final = (
    f"while (exec 3<>/dev/tcp/127.0.0.1/{PROGRESS.number}) 2>/dev/null; do sleep 0.2; done; kill -KILL -1; sleep 10"
)
"""Runs in Ray's container when the head's pod is deleted. The supervisor gets SIGTERM at once, lets the workers commit
and leave, and exits. Until then Ray has to run: without it the workers would end, and lose the steps since their last
commit. Then Ray is killed, because by itself it may take its whole grace period to end. `ray start` sees that within a
second and exits; the container must not get its SIGTERM before that, at which `ray start` would ask the dead GCS for
30 s to drain the node."""
_OWN_COMMAND: Final = "ray.io/overwrite-container-cmd"
"""Annotation by which KubeRay leaves the command of a Ray container alone (KubeRay 1.3 and newer)."""
_WORKER_COMMAND: Final = ("python", "-m", "spotune_trainer.worker_group.worker_node")
"""It runs the command of KubeRay's, and keeps the container while ranks train on after a loss of the head."""
_GPUS_ADVICE: Final = "give GPUs per pod as workers.gpus; the head has none"

HeadOrWorkers = Literal["head", "workers"]


def head_pod(resolved: ResolvedJob) -> Pod:
    """The pod template of the head: Ray's control plane and the driver, with the supervisor beside them.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    amounts = _resources(resolved, "head", HEAD_CONTAINER, HEAD)
    capacity = resolved.job.spec.head.capacity
    grace = grace_seconds(resolved.provider, capacity)
    # KubeRay's head Service has only the ports of the first container, so this one names the supervisor's port.
    ray = _ray_container(resolved, HEAD_CONTAINER, (GCS, DASHBOARD, METRICS, PROGRESS), WORKER_LOSS)
    supervisor = _supervisor(resolved, grace - DRAIN_MARGIN_SECONDS)
    code = _code_volumes(resolved)
    for container in (ray, supervisor):
        container["env"] += code_environment(resolved)
        container["volumeMounts"] += [
            {"name": volume["name"], "mountPath": CODE_FOLDER, "readOnly": True} for volume in code
        ]
    ray["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", _STOP_AFTER_SUPERVISOR]}}}
    enforced = _enforced_spec(resolved, capacity, gpus=False, grace=grace)
    enforced["containers"] = [ray | {"resources": amounts}, supervisor]
    enforced["volumes"] += [{"name": "job", "configMap": {"name": resolved.name}}, *code]
    default_supervisor = default_container(SUPERVISOR_CONTAINER, shm=False) | {"resources": SUPERVISOR}
    defaults = default_pod_spec([default_container(HEAD_CONTAINER), default_supervisor], shared_memory(amounts))
    defaults["volumes"] += _own_volumes(resolved)
    return Pod(_template(resolved, "head", defaults, enforced), amounts)


def worker_capacities(resolved: ResolvedJob) -> tuple[Capacity, ...]:
    """The capacity type of each worker group without pools; a second group is used while the first has no nodes."""
    capacity = resolved.job.spec.workers.capacity
    return ("spot", "on-demand") if capacity == "spot-then-on-demand" else (capacity,)


def worker_pod(resolved: ResolvedJob, capacity: Capacity, pool: PoolSpec | None = None) -> Pod:
    """The pod template of a worker on nodes of one capacity type: Ray, and one training process a GPU.

    Args:
        resolved: The job.
        capacity: Of the nodes.
        pool: The pool of the nodes; None for any node of this capacity type.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    workers = resolved.job.spec.workers
    amounts = _resources(resolved, "workers", WORKER_CONTAINER, worker_defaults(workers.gpus))
    grace = grace_seconds(resolved.provider, capacity)
    settings = {"SPOTUNE_CAPACITY": capacity, **drain_settings(grace), **HEAD_LOSS}
    ray = _ray_container(resolved, WORKER_CONTAINER, (METRICS,), settings)
    enforced = _enforced_spec(resolved, capacity, gpus=workers.gpus > 0, grace=grace, pool=pool)
    ray["env"].append({"name": "SPOTUNE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    enforced["containers"] = [ray | {"resources": amounts, "command": [*_WORKER_COMMAND], "args": []}]
    spread = resolved.owner.pod_selector("workers")
    defaults = default_pod_spec([default_container(WORKER_CONTAINER)], shared_memory(amounts), spread)
    defaults["volumes"] += _own_volumes(resolved)
    template = _template(resolved, "workers", defaults, enforced, annotations={_OWN_COMMAND: "true"})
    return Pod(template, amounts)


def _template(
    resolved: ResolvedJob,
    group: HeadOrWorkers,
    defaults: Mapping[str, Any],
    enforced: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    labels = resolved.labels(group)
    if resolved.job.spec.workers.service_account_name:
        labels = labels | dict(resolved.provider.workload_identity_labels)
    metadata = {"labels": labels, **({"annotations": dict(annotations)} if annotations else {})}
    return merged_template(_section(resolved, group), defaults, metadata, enforced)


def _enforced_spec(
    resolved: ResolvedJob, capacity: Capacity, *, gpus: bool, grace: int, pool: PoolSpec | None = None
) -> dict[str, Any]:
    """The enforced ``v1.PodSpec``, above the user's, without containers."""
    shared = {"name": DATA_VOLUME, "persistentVolumeClaim": {"claimName": resolved.claim}}
    volumes = [] if resolved.bucket else [shared]
    account = resolved.job.spec.workers.service_account_name
    spec = enforced_pod_spec(
        resolved.provider,
        capacity,
        gpus=gpus,
        grace=grace,
        volumes=volumes,
        service_account=account,
        gpu_type=pool.gpu_type if pool is not None else "",
    )
    return spec | ({"nodeSelector": pool.labels} if pool is not None and pool.labels else {})


def _own_volumes(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """With a bucket: the volume of the pod's own, which the user's template may replace, as by a local disk."""
    return [{"name": DATA_VOLUME, "emptyDir": {}}] if resolved.bucket else []


def _code_volumes(resolved: ResolvedJob) -> list[dict[str, Any]]:
    """The ConfigMap with the code of the user. It is optional: a run that has read it starts without it."""
    code_from = resolved.job.spec.training.code_from
    if code_from is None or code_from.config_map is None:
        return []
    return [{"name": "code", "configMap": {"name": code_from.config_map.name, "optional": True}}]


def _enforced_container(resolved: ResolvedJob, name: str, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """The enforced fields of every container; ``envFrom`` only if the job names credentials."""
    mounts = [{"name": DATA_VOLUME, "mountPath": str(DATA)}]
    container = enforced_container(name, resolved.image, [*environment, *job_environment(resolved)], mounts)
    secrets = credentials(resolved)
    return container | ({"envFrom": secrets} if secrets else {})


def _ray_container(
    resolved: ResolvedJob, name: str, ports: tuple[Port, ...], settings: Mapping[str, str]
) -> dict[str, Any]:
    return _enforced_container(resolved, name, variables(settings)) | {"ports": [port.of_container() for port in ports]}


def _supervisor(resolved: ResolvedJob, commit_seconds: int) -> dict[str, Any]:
    """The supervisor container: it submits drivers to the Ray beside it until the model is trained.

    When the pod is deleted, the workers have `commit_seconds` for a last commit. Its liveness probe is generous: a
    restart loses no state, but rarely cures slowness. It has no readiness probe: the head is ready when Ray is ready,
    independently of the training.
    """
    pools = resolved.job.spec.workers.pools
    capacities = [pool.capacity for pool in pools] or [worker_capacities(resolved)[0]]
    notice = min(grace_seconds(resolved.provider, each) for each in capacities)  # the time for a commit on most nodes
    settings = {"SPOTUNE_NOTICE_SECONDS": str(notice), "SPOTUNE_COMMIT_SECONDS": str(commit_seconds)}
    environment = [*variables(settings), *ray_token(resolved)]
    container = _enforced_container(resolved, SUPERVISOR_CONTAINER, environment)
    container["volumeMounts"].append({"name": "job", "mountPath": _CONFIG, "readOnly": True})
    return container | {
        "command": [
            *("spotune", "supervise", f"{_CONFIG}/{JOB_FILE}", "--directory", str(resolved.directory)),
            *("--ray", f"http://127.0.0.1:{DASHBOARD.number}", "--serve", f"0.0.0.0:{PROGRESS.number}"),
            *(("--bucket", resolved.bucket) if resolved.bucket else ()),
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
    gpus = resolved.job.spec.workers.gpus if group == "workers" else 0
    return container_resources(_section(resolved, group), container, defaults, gpus, _GPUS_ADVICE)


def _section(resolved: ResolvedJob, group: HeadOrWorkers) -> PodSection:
    spec = resolved.job.spec
    section = spec.head if group == "head" else spec.workers
    return PodSection(f"spec.{group}", section.pod_template, section.resources)
