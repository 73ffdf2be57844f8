"""Pods of a service: what each may read, where it runs, and which fields of a template survive."""

import os
import subprocess
import sys
from typing import Any

import pytest

from spotune_operator.children.serving.resolved_service import ModelLocation
from spotune_operator.errors import PodTemplateError, ResourcesError, StalledError
from spotune_operator.providers import AKS, GKE, PROVIDERS, Provider
from tests.operator.support.resolved_jobs import container, environment, holds
from tests.operator.support.resolved_services import HUB, TRAINED, cluster, groups, pods, resolved_service_of, templates

HEAD, WORKER = "ray-head", "ray-worker"
KEYS = {"name": "keys", "key": "all"}
SCALING = {"min": 1, "max": 2}


def first(pod: dict[str, Any]) -> dict[str, Any]:
    """The Ray container."""
    return dict(pod["containers"][0])


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    """Variables of the Ray container: the value, or its source."""
    return environment(pod, first(pod)["name"])


def mounted(pod: dict[str, Any]) -> dict[str, Any]:
    """Volumes by mount path of the Ray container, each with `ro`: whether the mount is read-only."""
    by_name = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = first(pod)["volumeMounts"]
    return {mount["mountPath"]: by_name[mount["name"]] | {"ro": mount.get("readOnly", False)} for mount in mounts}


def capacity_terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    found: list[dict[str, Any]] = term["matchExpressions"]
    return found


def test_gateway_and_replicas_mount_all_claims_read_only_and_the_head_none() -> None:
    adapters = {"sql": ModelLocation("exports", "sql"), "chat": ModelLocation(TRAINED.claim, "chat")}
    found = pods(resolved_service_of(adapters=adapters))
    for name in ("gateway", "spot"):
        claims = {path: volume for path, volume in mounted(found[name]).items() if path.startswith("/models")}
        assert sorted(claims) == ["/models/exports", "/models/spotune-job"]
        for path, volume in claims.items():
            assert volume["persistentVolumeClaim"] == {"claimName": path.removeprefix("/models/"), "readOnly": True}
            assert volume["ro"]
    assert not any("persistentVolumeClaim" in volume for volume in found["head"]["volumes"])


def test_a_model_of_the_hub_needs_no_claim() -> None:
    for pod in pods(resolved_service_of(location=HUB)).values():
        assert not any("persistentVolumeClaim" in volume for volume in pod["volumes"])


def test_api_keys_are_a_file_of_the_gateway_alone() -> None:
    found = pods(resolved_service_of(apiKeysSecretRef=KEYS))
    keys = mounted(found["gateway"])["/etc/spotune/api-keys"]
    assert keys["secret"] == {"secretName": "keys", "items": [{"key": "all", "path": "keys"}]}
    assert keys["ro"]
    assert not any("secret" in volume for name in ("head", "spot") for volume in found[name]["volumes"])


def test_token_of_the_hub_reaches_gateway_and_replicas_alone() -> None:
    token = {"name": "hf", "key": "token"}
    found = pods(resolved_service_of(location=HUB, model={"source": HUB.source, "tokenSecretRef": token}))
    for name in ("gateway", "spot"):
        assert variables(found[name])["HF_TOKEN"] == {"secretKeyRef": token}
    assert "HF_TOKEN" not in variables(found["head"])


def test_only_replicas_run_on_spot_nodes() -> None:
    found = pods(resolved_service_of(AKS, capacity="mixed", gpus=1, replicas=SCALING))
    operators = {name: capacity_terms(pod)[0]["operator"] for name, pod in found.items()}
    assert operators == {"head": "NotIn", "gateway": "NotIn", "on-demand": "NotIn", "spot": "In"}
    tolerated = {name: {each["key"] for each in pod["tolerations"]} for name, pod in found.items()}
    spot = "kubernetes.azure.com/scalesetpriority"
    assert [name for name, keys in tolerated.items() if spot in keys] == ["spot"]
    assert [name for name, keys in tolerated.items() if "nvidia.com/gpu" in keys] == ["on-demand", "spot"]


def test_gpus_are_those_of_replicas() -> None:
    found = pods(resolved_service_of(gpus=2))
    assert first(found["spot"])["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    assert "limits" not in first(found["gateway"])["resources"]
    assert first(pods(resolved_service_of(gpus=0))["spot"])["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}}


def test_pods_of_one_component_prefer_different_nodes() -> None:
    for name, component in (("gateway", "gateway"), ("spot", "replicas")):
        affinity = pods(resolved_service_of(AKS))[name]["affinity"]["podAntiAffinity"]
        (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        labels = preferred["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert labels == {"spotune.dev/service": "answers", "app.kubernetes.io/component": component}


def test_pods_are_labelled_by_service_and_component() -> None:
    found = templates(resolved_service_of(capacity="mixed", replicas=SCALING))
    components = {name: each["metadata"]["labels"]["app.kubernetes.io/component"] for name, each in found.items()}
    replicas = {"on-demand": "replicas", "spot": "replicas"}
    assert components == {"head": "head", "gateway": "gateway", **replicas}
    for template in found.values():
        assert template["metadata"]["labels"]["spotune.dev/service"] == "answers"


def test_a_gateway_is_ready_when_it_listens_and_a_replica_when_ray_runs() -> None:
    """KubeRay's own probe runs a program of the image, and asks proxies that do not run."""
    found = pods(resolved_service_of())
    for name, port in {"gateway": 8000, "spot": 8080}.items():
        assert first(found[name])["readinessProbe"]["tcpSocket"] == {"port": port}
    assert "readinessProbe" not in first(found["head"])


def test_the_head_names_the_port_of_ray_serve_as_kuberay_requires() -> None:
    head = pods(resolved_service_of())["head"]
    assert {"name": "serve", "containerPort": 8000, "protocol": "TCP"} in first(head)["ports"]


def test_a_lost_head_is_detected_quickly_unless_redis_keeps_its_state() -> None:
    timeout = "RAY_gcs_rpc_server_reconnect_timeout_s"
    without = pods(resolved_service_of())
    with_redis = pods(resolved_service_of(cluster={"redisAddress": "redis:6379"}))
    for name in ("gateway", "spot"):
        assert variables(without[name])[timeout] == "5"
        assert timeout not in variables(with_redis[name])
    for found in (without, with_redis):
        assert found["head"]["terminationGracePeriodSeconds"] == 5
        assert variables(found["head"])["RAY_health_check_failure_threshold"] == "4"


def test_ray_serve_reads_the_patience_that_the_head_gives_it() -> None:
    """Private variables of Ray, which may have other names in another version."""
    given = variables(pods(resolved_service_of())["head"])
    names = ("RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT", "RAY_SERVE_SLOW_STARTUP_WARNING_S")
    program = (
        "from ray.serve._private.constants import MAX_PER_REPLICA_RETRY_COUNT as retries;"
        "from ray.serve._private.deployment_state import SLOW_STARTUP_WARNING_S as seconds;"
        "print(retries, seconds)"
    )
    chosen = {name: given[name] for name in names}
    said = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **chosen}, text=True)
    assert said.split() == list(chosen.values())


def test_only_the_container_of_the_autoscaler_gets_a_token_of_the_api_server() -> None:
    resolved = resolved_service_of(replicas=SCALING)
    for pod in pods(resolved).values():
        assert pod["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in pod
    head = pods(resolved)["head"]
    (token,) = [volume for volume in head["volumes"] if "projected" in volume]
    assert "/var/run/secrets/kubernetes.io/serviceaccount" not in mounted(head)
    options = cluster(resolved)["autoscalerOptions"]
    mounts = {mount["mountPath"]: mount["name"] for mount in options["volumeMounts"]}
    assert mounts["/var/run/secrets/kubernetes.io/serviceaccount"] == token["name"]
    files = [source for source in token["projected"]["sources"] if "serviceAccountToken" in source]
    assert files[0]["serviceAccountToken"]["path"] == "token"
    assert not any("projected" in volume for volume in pods(resolved_service_of())["head"]["volumes"])


def test_service_account_is_that_of_gateway_and_replicas() -> None:
    """Not of the head: KubeRay would give its rights for the autoscaler to that account."""
    resolved = resolved_service_of(AKS, serviceAccountName="reader", replicas=SCALING)
    found = pods(resolved)
    for name in ("gateway", "spot"):
        assert (found[name]["serviceAccountName"], found[name]["automountServiceAccountToken"]) == ("reader", True)
        assert templates(resolved)[name]["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    assert "serviceAccountName" not in found["head"]


def test_pods_beside_an_autoscaler_do_not_restart_as_kuberay_requires() -> None:
    assert {pod["restartPolicy"] for pod in pods(resolved_service_of(replicas=SCALING)).values()} == {"Never"}
    assert cluster(resolved_service_of(replicas=SCALING))["autoscalerOptions"]["version"] == "v2"
    assert {pod["restartPolicy"] for pod in pods(resolved_service_of()).values()} == {"Always"}


def test_every_container_meets_the_restricted_pod_security_standard() -> None:
    resolved = resolved_service_of(GKE, replicas=SCALING, gpus=1, apiKeysSecretRef=KEYS)
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for pod in pods(resolved).values():
        assert holds(pod["securityContext"], {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}})
        assert all(each["securityContext"] == restricted for each in pod["containers"])
    assert cluster(resolved)["autoscalerOptions"]["securityContext"] == restricted


def test_replicas_may_have_a_priority() -> None:
    found = pods(resolved_service_of(priorityClassName="serving"))
    assert {name: pod.get("priorityClassName") for name, pod in found.items()} == {
        "head": None,
        "gateway": None,
        "spot": "serving",
    }


def test_each_template_changes_its_own_pods_and_keeps_the_enforced_fields() -> None:
    mine = {
        "spec": {"restartPolicy": "OnFailure", "containers": [{"name": WORKER, "env": [{"name": "A", "value": "b"}]}]}
    }
    for section, changed, other in ((mine, "spot", "gateway"), (None, "gateway", "spot")):
        spec = {"podTemplate": section} if section else {"gateway": {"podTemplate": mine}}
        found = pods(resolved_service_of(**spec))
        assert variables(found[changed])["A"] == "b"
        assert "A" not in variables(found[other])
        assert found[changed]["restartPolicy"] == "Always"
        assert container(found[changed], WORKER)["image"] == first(found["head"])["image"]


def test_the_gateways_template_places_the_head_and_lets_it_pull_images() -> None:
    template = {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "system"},
        "containers": [{"name": WORKER, "env": [{"name": "A", "value": "b"}]}],
    }
    head = pods(resolved_service_of(gateway={"podTemplate": {"spec": template}}))["head"]
    assert (head["imagePullSecrets"], head["nodeSelector"]) == ([{"name": "registry"}], {"pool": "system"})
    assert [each["name"] for each in head["containers"]] == [HEAD]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"podTemplate": {"containers": []}}, PodTemplateError, r"^spec\.podTemplate\.containers: is not a field"),
        (
            {"gateway": {"podTemplate": {"spec": {"containers": [{"name": "gateway"}]}}}},
            PodTemplateError,
            r"^spec\.gateway\.podTemplate\.spec\.containers\[gateway\]: has no image.*\(ray-worker\)",
        ),
        (
            {"gateway": {"podTemplate": {"spec": {"tolerations": "all"}}}},
            PodTemplateError,
            r"^spec\.gateway\.podTemplate\.spec\.tolerations: is a list",
        ),
        ({"gateway": {"podTemplate": {"spec": []}}}, PodTemplateError, r"^spec\.gateway\.podTemplate\.spec: is a "),
        (
            {"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}},
            ResourcesError,
            r"^spec\.resources\.requests\.memory: 8Gi is larger than limits\.memory, 4Gi",
        ),
        (
            {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            ResourcesError,
            r"^spec\.resources: must not contain nvidia\.com/gpu: give GPUs per replica as spec\.gpus",
        ),
        (
            {"gateway": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
            ResourcesError,
            r"^spec\.gateway\.resources: must not contain nvidia\.com/gpu",
        ),
    ],
)
def test_invalid_section_is_refused_by_field(spec: dict[str, Any], error: type[StalledError], message: str) -> None:
    with pytest.raises(error, match=message):
        pods(resolved_service_of(**spec))


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_pods_on_lost_nodes_are_deleted_soon(provider: Provider) -> None:
    lost = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    for pod in pods(resolved_service_of(provider)).values():
        assert lost | {"tolerationSeconds": 20} in pod["tolerations"]


def test_a_toleration_changes_more_of_the_template_than_the_tolerations() -> None:
    """KubeRay ignores tolerations when it compares templates."""
    toleration = {"key": "example.org/gpu", "operator": "Exists"}
    plain = groups(resolved_service_of())["spot"]["template"]
    tolerant = groups(resolved_service_of(podTemplate={"spec": {"tolerations": [toleration]}}))["spot"]["template"]
    for template in (plain, tolerant):
        del template["spec"]["tolerations"]
    assert plain != tolerant
