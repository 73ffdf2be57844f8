"""The pod templates of a service: head, gateway and replicas.

Only the gateway holds connections of clients, and it never runs on spot nodes. Replicas may be taken away: the gateway
continues their requests elsewhere. The head runs Ray's control plane alone: it mounts no model and no Secret.
"""

from collections.abc import Mapping
from typing import Any, Final

from spotune.custom_resource.object_names import GATEWAY, HEAD_COMPONENT, HEAD_CONTAINER, REPLICAS, WORKER_CONTAINER
from spotune.custom_resource.pods import ResourcesSpec
from spotune_operator.children.pod_template.environment import CACHE, default_environment, secret_variable, variables
from spotune_operator.children.pod_template.layers import Pod, PodSection, container_resources, merged_template
from spotune_operator.children.pod_template.ray_pods import (
    CONTAINER_SECURITY,
    HEAD_GRACE_SECONDS,
    HEAD_LOSS,
    ON_DEMAND_GRACE_SECONDS,
    WORKER_LOSS,
    default_container,
    default_pod_spec,
    drain_settings,
    enforced_container,
    enforced_pod_spec,
    grace_seconds,
)
from spotune_operator.children.pod_template.resources import (
    AUTOSCALER,
    GATEWAY_POD,
    HEAD,
    Amounts,
    shared_memory,
    worker_defaults,
)
from spotune_operator.children.ports import DASHBOARD, GCS, METRICS, SERVE, Port
from spotune_operator.children.serving.resolved_service import MODELS, ResolvedService
from spotune_operator.children.serving.serve_config import API_KEYS_FILE, API_KEYS_FOLDER, arguments_digest
from spotune_operator.kube.digest import digest
from spotune_operator.providers import Capacity

ARGUMENTS_ANNOTATION: Final = "spotune.dev/serve-arguments"
"""Digest of the arguments of the gateway's Ray Serve application."""

TOLERATIONS_ANNOTATION: Final = "spotune.dev/tolerations"
"""Hash of the tolerations. KubeRay ignores them when it compares templates, so a change would never reach a pod."""

_START_ATTEMPTS: Final = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "20"}
"""Ray Serve gives up for good after this many failed starts per replica (default: 3), reclaimed nodes included."""
_RECOVERY: Final = {"RAY_SERVE_SLOW_STARTUP_WARNING_S": "300"}
"""After the loss of a head, Ray Serve's new controller kills replicas that do not respond for so long (default: 30).

With a gateway, it kills all open streams. A node that is lost is found out by Ray itself, and much earlier.
"""
_GPUS_ADVICE: Final = "give GPUs per replica as spec.gpus; the gateway has none"
_PLACED_AS_GATEWAY: Final = ("imagePullSecrets", "nodeSelector", "tolerations")
_TOKEN: Final = "kube-api-access"
_TOKEN_FOLDER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_SECONDS: Final = 3600
_READINESS: Final = {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 2}
"""Of a TCP port, without a program in the image. KubeRay's own probe asks Ray Serve's proxies, which are disabled."""

_LOGS: Final = {"RAY_LOG_TO_STDERR": "1", "RAY_BACKEND_LOG_LEVEL": "warning"}
"""Processes of Ray Serve log to the pod, where ``spotune logs`` reads, and not to files. Ray itself logs warnings."""


def service_head_pod(resolved: ResolvedService) -> Pod:
    """The pod template of the head.

    It has no section of its own in a ModelService: the gateway's pod template places it, too.

    Raises:
        StalledError: The gateway's pod template is invalid.
    """
    section = PodSection("spec.gateway", _placement(resolved), ResourcesSpec())
    amounts = container_resources(section, HEAD_CONTAINER, HEAD, 0, _GPUS_ADVICE)
    settings = variables({**WORKER_LOSS, **_START_ATTEMPTS, **_RECOVERY, **_LOGS})
    container = enforced_container(HEAD_CONTAINER, resolved.image, settings, [])
    enforced = enforced_pod_spec(
        resolved.provider,
        "on-demand",
        gpus=False,
        grace=HEAD_GRACE_SECONDS,
        volumes=[_api_token()] if resolved.service.spec.replicas.autoscales else [],
        restart_policy=_restart_policy(resolved),
    )
    # KubeRay makes no Service for Ray Serve unless the head names its port.
    ports = [port.of_container() for port in (GCS, DASHBOARD, METRICS, SERVE)]
    enforced["containers"] = [container | {"ports": ports, "resources": amounts}]
    defaults = default_pod_spec([default_container(HEAD_CONTAINER)], shared_memory(amounts))
    metadata = {"labels": resolved.owner.labels(HEAD_COMPONENT)}
    return Pod(_with_tolerations_digest(merged_template(section, defaults, metadata, enforced)), amounts)


def gateway_pod(resolved: ResolvedService) -> Pod:
    """The pod template of the gateway, on on-demand nodes.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    gateway = resolved.service.spec.gateway
    section = PodSection("spec.gateway", gateway.pod_template, gateway.resources)
    amounts = container_resources(section, WORKER_CONTAINER, GATEWAY_POD, 0, _GPUS_ADVICE)
    pod = _worker(resolved, "on-demand", (METRICS, SERVE), amounts, gpus=False, grace=ON_DEMAND_GRACE_SECONDS)
    keys = resolved.service.spec.api_keys_secret_ref
    if keys is not None:
        items = [{"key": keys.key, "path": API_KEYS_FILE}]
        pod["volumes"].append({"name": "api-keys", "secret": {"secretName": keys.name, "items": items}})
        mount = {"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True}
        pod["containers"][0]["volumeMounts"].append(mount)
    return _merged_worker(resolved, section, GATEWAY, pod, amounts, ready=SERVE)


def replica_pod(resolved: ResolvedService, capacity: Capacity) -> Pod:
    """The pod template of a replica on nodes of one capacity type.

    Raises:
        StalledError: The pod template or the resources are invalid.
    """
    spec = resolved.service.spec
    section = PodSection("spec", spec.pod_template, spec.resources)
    amounts = container_resources(section, WORKER_CONTAINER, worker_defaults(spec.gpus), spec.gpus, _GPUS_ADVICE)
    grace = grace_seconds(resolved.provider, capacity)
    pod = _worker(resolved, capacity, (METRICS,), amounts, gpus=spec.gpus > 0, grace=grace)
    if spec.priority_class_name:
        pod["priorityClassName"] = spec.priority_class_name
    # A replica has no port. Whether it has loaded its model is in the status of the ModelService.
    return _merged_worker(resolved, section, REPLICAS, pod, amounts, ready=METRICS)


def autoscaler_options() -> dict[str, Any]:
    """``autoscalerOptions`` of the RayCluster: the container that KubeRay adds to the head pod.

    It alone gets the token of the service account that KubeRay creates for it, which may change pods and RayClusters of
    the namespace: Ray's head container executes any code that a client of the cluster sends.
    """
    mounts = [
        {"name": "cache", "mountPath": CACHE},
        {"name": _TOKEN, "mountPath": _TOKEN_FOLDER, "readOnly": True},
    ]
    return {
        "version": "v2",
        "idleTimeoutSeconds": 60,
        "imagePullPolicy": "IfNotPresent",
        "env": default_environment(),
        "resources": AUTOSCALER,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }


def _worker(
    resolved: ResolvedService, capacity: Capacity, ports: tuple[Port, ...], amounts: Amounts, *, gpus: bool, grace: int
) -> dict[str, Any]:
    """The enforced ``v1.PodSpec`` of a pod that reads the model."""
    # With Redis, workers survive the loss of the head: KubeRay lets them wait for ten minutes.
    head_loss = {} if resolved.service.spec.cluster.redis_address else HEAD_LOSS
    environment = [*variables({**drain_settings(grace), **head_loss, **_LOGS}), *_hub_token(resolved)]
    mounts = [
        {"name": _volume_name(number), "mountPath": str(MODELS / claim), "readOnly": True}
        for number, claim in enumerate(resolved.claims)
    ]
    volumes = [
        # Read-only here, too, or the kubelet changes the group of the files.
        {"name": _volume_name(number), "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for number, claim in enumerate(resolved.claims)
    ]
    container = enforced_container(WORKER_CONTAINER, resolved.image, environment, mounts)
    pod = enforced_pod_spec(
        resolved.provider,
        capacity,
        gpus=gpus,
        grace=grace,
        volumes=volumes,
        service_account=resolved.service.spec.service_account_name,
        restart_policy=_restart_policy(resolved),
    )
    named_ports = [port.of_container() for port in ports]
    return pod | {"containers": [container | {"ports": named_ports, "resources": amounts}]}


def _merged_worker(
    resolved: ResolvedService,
    section: PodSection,
    component: str,
    enforced: Mapping[str, Any],
    amounts: Amounts,
    *,
    ready: Port,
) -> Pod:
    probe = {"tcpSocket": {"port": ready.number}, **_READINESS}
    container = default_container(WORKER_CONTAINER) | {"readinessProbe": probe}
    defaults = default_pod_spec([container], shared_memory(amounts), resolved.owner.pod_selector(component))
    labels = resolved.owner.labels(component)
    if resolved.service.spec.service_account_name:
        labels = labels | dict(resolved.provider.workload_identity_labels)
    # KubeRay makes a new cluster when a template changes, and switches to it when it is ready. Without the annotation,
    # Ray Serve would restart all gateways of the running cluster at once for a new argument.
    metadata = {"labels": labels, "annotations": {ARGUMENTS_ANNOTATION: arguments_digest(resolved)}}
    return Pod(_with_tolerations_digest(merged_template(section, defaults, metadata, enforced)), amounts)


def _with_tolerations_digest(template: dict[str, Any]) -> dict[str, Any]:
    metadata = template["metadata"]
    annotations = metadata.get("annotations", {}) | {
        TOLERATIONS_ANNOTATION: digest(template["spec"].get("tolerations", []))
    }
    return template | {"metadata": metadata | {"annotations": annotations}}


def _restart_policy(resolved: ResolvedService) -> str:
    """Version 2 of Ray's autoscaler replaces pods, and KubeRay refuses pods that restart beside it."""
    return "Never" if resolved.service.spec.replicas.autoscales else "Always"


def _hub_token(resolved: ResolvedService) -> list[dict[str, Any]]:
    token = resolved.service.spec.model.token_secret_ref
    return [secret_variable("HF_TOKEN", token)] if token is not None else []


def _placement(resolved: ResolvedService) -> dict[str, Any]:
    """The part of the gateway's pod template that also holds for the head: which nodes, and how images are pulled."""
    spec = resolved.service.spec.gateway.pod_template.get("spec")
    given = spec if isinstance(spec, dict) else {}
    return {"spec": {name: given[name] for name in _PLACED_AS_GATEWAY if name in given}}


def _volume_name(number: int) -> str:
    """Name of the volume of a claim; the name of a claim may be too long for one."""
    return f"model-{number}"


def _api_token() -> dict[str, Any]:
    """The volume with the credentials for the API server, as Kubernetes would mount it into all containers."""
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    return {"name": _TOKEN, "projected": {"sources": sources}}
