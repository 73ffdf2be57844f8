"""Head and worker pods: the enforced fields survive any template; all other fields are defaults."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_operator.children.config import config_map
from spotune_operator.children.pod_template.layers import Pod
from spotune_operator.children.pods import head_pod, worker_pod
from spotune_operator.errors import PodTemplateError, ResourcesError, StalledError
from spotune_operator.providers import (
    AKS,
    EKS,
    GKE,
    NONE,
    PROVIDERS,
    Capacity,
    Provider,
)
from tests.operator.support.resolved_jobs import (
    container,
    environment,
    head,
    holds,
    resolved_job_of,
    with_user_code,
    worker,
)

WORKER, HEAD, SUPERVISOR = "ray-worker", "ray-head", "supervisor"
CAPACITIES: tuple[Capacity, ...] = ("spot", "on-demand")
CREDENTIALS: dict[str, Any] = {
    "model": {"source": "hf://me/model", "task": "seq2seq", "tokenSecretRef": {"name": "hf", "key": "token"}},
    "dataset": {
        "train": {"source": "s3://bucket/train"},
        "credentials": {"secretName": "bucket", "endpoint": "https://minio"},
    },
}


def template(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def template_of(container_name: str, **fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": container_name, **fields}])


def all_pods(**sections: Any) -> list[Pod]:
    resolved = resolved_job_of(AKS, **sections)
    return [head_pod(resolved), *(worker_pod(resolved, capacity) for capacity in CAPACITIES)]


def test_the_ray_container_comes_first_as_kuberay_expects() -> None:
    sidecar = {"name": "a-sidecar", "image": "log"}
    assert [item["name"] for item in head(**template(containers=[sidecar]))["containers"]] == [
        HEAD,
        SUPERVISOR,
        "a-sidecar",
    ]
    assert [item["name"] for item in worker(**template(containers=[sidecar]))["containers"]] == [WORKER, "a-sidecar"]


def test_supervisor_gets_the_directory_of_the_fingerprint() -> None:
    first, other_meaning = (head(sections={"training": {"epochs": 1, "seed": seed}}) for seed in (1, 2))
    same_meaning = head(sections={"training": {"epochs": 9, "seed": 1}})
    folders = [container(pod, SUPERVISOR)["command"][4] for pod in (first, other_meaning, same_meaning)]
    assert folders[0].startswith("/data/default/job-")
    assert len(folders[0]) == len("/data/default/job-") + 8
    assert folders[0] == folders[2] != folders[1]


def test_supervisor_gets_rays_address_and_token() -> None:
    found = container(head(), SUPERVISOR)
    assert found["command"][:3] == ["spotune", "supervise", "/etc/spotune/job.yaml"]
    assert found["command"][5:] == ["--ray", "http://127.0.0.1:8265", "--serve", "0.0.0.0:8090"]
    variables = environment(head(), SUPERVISOR)
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "spotune-job", "key": "auth_token"}}


def test_the_head_alone_gets_the_config_map_with_code_and_the_token_of_git() -> None:
    resolved = with_user_code(codeFrom={"configMap": {"name": "own-code"}})
    pod = head_pod(resolved).template["spec"]
    assert {"name": "code", "configMap": {"name": "own-code", "optional": True}} in pod["volumes"]
    token = {"name": "git", "key": "token"}
    git = with_user_code(codeFrom={"git": {"url": "https://a/b", "tokenSecretRef": token}})
    with_token = head_pod(git).template["spec"]
    for name in (HEAD, SUPERVISOR):
        mount = {"name": "code", "mountPath": "/etc/spotune-code", "readOnly": True}
        assert mount in container(pod, name)["volumeMounts"]
        assert environment(pod, name)["SPOTUNE_CODE_CONFIG_MAP"] == "/etc/spotune-code"
        assert environment(with_token, name)["GIT_TOKEN"] == {"secretKeyRef": token}
    for job in (resolved, git):
        assert not re.search(r"own-code|GIT_TOKEN", str(worker_pod(job, "spot")))
    assert "tokenSecretRef" not in config_map(git)["data"]["job.yaml"]


def test_progress_is_a_port_of_the_first_container_because_kuberays_service_has_only_those() -> None:
    assert {"name": "progress", "containerPort": 8090, "protocol": "TCP"} in container(head(), HEAD)["ports"]


def test_readiness_of_the_head_is_independent_of_training() -> None:
    assert "readinessProbe" not in container(head(), SUPERVISOR)


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_draining_ends_before_the_pod_is_killed_and_the_pod_before_the_machine(provider: Provider) -> None:
    pod = worker(provider)
    drain = int(environment(pod, WORKER)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert 0 < drain < pod["terminationGracePeriodSeconds"] <= provider.notice_seconds


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_workers_commit_before_a_head_that_is_deleted_ends(provider: Provider) -> None:
    pod = head(provider)
    seconds = int(environment(pod, SUPERVISOR)["SPOTUNE_COMMIT_SECONDS"])
    assert 0 < seconds < pod["terminationGracePeriodSeconds"]
    assert "/dev/tcp/127.0.0.1/8090" in container(pod, HEAD)["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "lifecycle" not in container(pod, SUPERVISOR), "it gets its SIGTERM at once"


def test_lost_head_is_detected_quickly() -> None:
    variables = environment(worker(), WORKER)
    assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"] == "5"
    assert variables["RAY_raylet_liveness_self_check_interval_ms"] == "1000"
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" not in environment(head(), HEAD)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_worker_container_runs_spotunes_process_in_place_of_rays_and_kuberay_keeps_it(capacity: Capacity) -> None:
    given = {"command": ["sleep"], "args": ["infinity"]}
    resolved = resolved_job_of(AKS, workers=template_of(WORKER, **given))
    pod = worker_pod(resolved, capacity).template
    assert pod["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    ray = container(pod["spec"], WORKER)
    assert (ray["command"][-1], ray["args"]) == ("spotune_trainer.worker_group.worker_node", [])
    assert "annotations" not in head_pod(resolved).template["metadata"], "KubeRay starts Ray on the head"


def test_on_demand_workers_have_longer_to_commit_than_a_notice() -> None:
    on_demand, spot = worker(AKS, capacity="on-demand"), worker(AKS, capacity="spot")
    assert on_demand["terminationGracePeriodSeconds"] > spot["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
@pytest.mark.parametrize(
    ("capacity", "first"), [("spot", "spot"), ("on-demand", "on-demand"), ("spot-then-on-demand", "spot")]
)
def test_supervisor_gets_the_notice_seconds_of_most_workers(provider: Provider, capacity: str, first: str) -> None:
    pod = worker(provider, capacity=capacity)
    assert environment(pod, WORKER)["SPOTUNE_CAPACITY"] == first
    supervisor = environment(head(provider, {"workers": {"capacity": capacity}}), SUPERVISOR)
    assert supervisor["SPOTUNE_NOTICE_SECONDS"] == str(pod["terminationGracePeriodSeconds"])


def test_pods_on_lost_nodes_are_deleted_soon_unless_the_template_overrides_it() -> None:
    lost = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
    assert lost | {"tolerationSeconds": 20} in worker()["tolerations"]
    longer = lost | {"tolerationSeconds": 60}
    assert [
        found for found in worker(**template(tolerations=[longer]))["tolerations"] if found["key"] == lost["key"]
    ] == [longer]


def test_workers_prefer_different_nodes() -> None:
    (preferred,) = worker()["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"


def test_users_node_affinity_and_capacity_type_must_both_match() -> None:
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["1"]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}
    pod = worker(GKE, **template(affinity={"nodeAffinity": required}))
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [found["key"] for found in term["matchExpressions"]] == [zone["key"], "cloud.google.com/gke-spot"]


def test_users_variables_stay_unless_enforced() -> None:
    mine = [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "HOME", "value": "/home/me"},
        {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"},
    ]
    variables = environment(worker(**template_of(WORKER, env=mine)), WORKER)
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["HOME"] == "/home/me"
    assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"] == "5"


@pytest.mark.parametrize("name", [HEAD, SUPERVISOR])
def test_secrets_that_the_job_names_reach_the_head(name: str) -> None:
    _has_credentials(head(sections=CREDENTIALS), name)


def test_secrets_that_the_job_names_reach_the_workers() -> None:
    _has_credentials(worker(sections=CREDENTIALS), WORKER)


def _has_credentials(pod: dict[str, Any], name: str) -> None:
    variables = environment(pod, name)
    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert variables["AWS_ENDPOINT_URL"] == variables["S3_ENDPOINT_URL"] == "https://minio"
    assert container(pod, name)["envFrom"] == [{"secretRef": {"name": "bucket"}}]


def test_pods_get_a_token_only_for_a_named_service_account() -> None:
    for pod in all_pods():
        assert pod.template["spec"]["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in pod.template["spec"]
    for pod in all_pods(workers={"serviceAccountName": "trainer"}):
        assert pod.template["spec"]["automountServiceAccountToken"] is True
        assert pod.template["spec"]["serviceAccountName"] == "trainer"
        assert pod.template["metadata"]["labels"]["azure.workload.identity/use"] == "true"


def test_every_container_meets_the_restricted_pod_security_standard() -> None:
    for pod in all_pods():
        spec = pod.template["spec"]
        assert holds(spec["securityContext"], {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}})
        for found in spec["containers"]:
            wanted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert found["securityContext"] == wanted


def test_template_may_set_another_user() -> None:
    pod = worker(**template(securityContext={"runAsUser": 2000, "runAsNonRoot": False}))
    assert pod["securityContext"]["runAsUser"] == 2000
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_empty_template_removes_nothing() -> None:
    assert worker(podTemplate={"spec": None, "metadata": None}) == worker()


@pytest.mark.parametrize(
    ("pod_template", "message"),
    [
        ({"containers": []}, r"spec\.workers\.podTemplate\.containers: is not a field of a pod template"),
        ({"spec": {"containers": "x"}}, r"spec\.workers\.podTemplate\.spec\.containers: is a list in one template"),
        (
            {"spec": {"containers": [{"name": "worker"}]}},
            r"spec\.workers\.podTemplate\.spec\.containers\[worker\]: has no image, and is not one of .*ray-worker",
        ),
    ],
)
def test_invalid_template_is_refused_by_field(pod_template: dict[str, Any], message: str) -> None:
    with pytest.raises(PodTemplateError, match=message):
        worker(podTemplate=pod_template)


def test_memory_backed_shared_memory_is_half_of_the_memory() -> None:
    def size(pod: dict[str, Any]) -> str:
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        return str(shm["sizeLimit"])

    assert size(worker(resources={"limits": {"memory": "64Gi"}})) == f"{32 * 1024}Mi"
    assert size(worker(gpus=0, resources={"requests": {"memory": "1Gi"}})) == "512Mi"


def test_gpus_are_limits_of_the_worker_and_raise_what_it_requests() -> None:
    one, eight = (container(worker(gpus=gpus), WORKER)["resources"] for gpus in (1, 8))
    assert one["limits"] == {"nvidia.com/gpu": "1"}
    assert eight["limits"] == {"nvidia.com/gpu": "8"}
    assert one["requests"] == {"cpu": "2", "memory": "8Gi"}
    assert eight["requests"] == {"cpu": "16", "memory": "64Gi"}
    assert "limits" not in container(worker(gpus=0), WORKER)["resources"]


def test_resources_of_the_job_override_those_of_the_template() -> None:
    resources = {"requests": {"cpu": "4"}, "limits": {"memory": "16Gi", "cpu": 8}}
    pod = worker(gpus=0, resources={"requests": {"cpu": "6"}}, **template_of(WORKER, resources=resources))
    assert container(pod, WORKER)["resources"] == {
        "requests": {"cpu": "6"},
        "limits": {"memory": "16Gi", "cpu": "8"},
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}},
            r"spec\.workers\.resources\.requests\.memory: 8Gi is larger than limits\.memory, 4Gi",
        ),
        (
            {"resources": {"limits": {"nvidia.com/gpu": 2}}},
            r"spec\.workers\.resources: must not contain nvidia\.com/gpu",
        ),
        (
            template_of(WORKER, resources={"requests": {"cpu": "many"}, "limits": {"cpu": "1"}}),
            r"spec\.workers\.podTemplate: 'many' is not a Kubernetes quantity",
        ),
    ],
)
def test_invalid_resources_are_refused_by_field(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ResourcesError, match=message):
        worker(**section)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "ray-worker", "data", "cpu", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "name",
                    "env",
                    "containers",
                    "volumes",
                    "tolerations",
                    "affinity",
                    "resources",
                    "limits",
                    "value",
                    "key",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    ["containers", "volumes", "tolerations", "affinity", "securityContext", "restartPolicy", "serviceAccountName"]
)


@given(st.dictionaries(fields, json_values))
def test_any_template_is_refused_by_field_or_keeps_the_enforced_fields(spec: dict[str, Any]) -> None:
    pod = _pod_or_refused_field(spec)
    if isinstance(pod, str):
        assert pod.startswith("spec.workers.")
        return
    ours = worker(EKS)
    assert pod["containers"][0]["name"] == WORKER
    owned = ("restartPolicy", "terminationGracePeriodSeconds", "automountServiceAccountToken")
    assert {name: pod[name] for name in owned} == {name: ours[name] for name in owned}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "spotune-job"}} in pod["volumes"]
    assert holds(pod["affinity"], {"nodeAffinity": ours["affinity"]["nodeAffinity"]})
    assert holds(pod["securityContext"], {"runAsNonRoot": True})
    assert container(pod, WORKER)["image"] == container(ours, WORKER)["image"]


def _pod_or_refused_field(spec: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return worker(EKS, podTemplate={"spec": spec})
    except StalledError as refused:
        return refused.field


def test_the_same_job_has_the_same_pods_every_time() -> None:
    def text(provider: Provider) -> str:
        resolved = resolved_job_of(provider, **CREDENTIALS)
        return json.dumps([head_pod(resolved).template, worker_pod(resolved, "spot").template])

    assert text(NONE) == text(NONE)
