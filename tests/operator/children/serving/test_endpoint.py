"""The endpoint: names, who reaches which pod, disruptions, Ingress, HTTPRoute and metrics."""

import re
from typing import Any

import pytest

from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.resolved_service import DefaultImages, ResolvedService, child_name
from tests.operator.support.resolved_jobs import resolved_job_of
from tests.operator.support.resolved_services import child, cluster, pods, resolved_service_of, templates

UID = "8a1f0c52-4a0c-4f0e-9a57-1d6f5c1f4d11"
INGRESS = {"host": "models.example.com"}
HTTP_ROUTE: dict[str, Any] = {"hostnames": ["api.example.com", "api.example.org"], "parentRefs": [{"name": "public"}]}


def rules(resolved: ResolvedService, name: str = "spotunems-answers") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = child(resolved, "NetworkPolicy", name)["spec"]["ingress"]
    return found


def ports(rule: dict[str, Any]) -> list[int]:
    return [port["port"] for port in rule["ports"]]


def selected(resolved: ResolvedService, selector: dict[str, str]) -> list[str]:
    """Groups whose pods have the labels."""
    found = templates(resolved).items()
    return [name for name, template in found if selector.items() <= template["metadata"]["labels"].items()]


def test_a_small_service_has_a_policy_a_service_and_a_ray_service() -> None:
    assert [each["kind"] for each in build_service_children(resolved_service_of())] == [
        "NetworkPolicy",
        "NetworkPolicy",
        "Service",
        "RayService",
    ]


def test_children_belong_to_the_service_without_blocking_its_deletion() -> None:
    options = {"uid": UID, "monitoring_namespace": "monitoring"}
    spec: dict[str, Any] = {"ingress": INGRESS, "httpRoute": HTTP_ROUTE, "gateway": {"replicas": 2}}
    children = build_service_children(resolved_service_of(options=options, **spec))
    assert len(children) == 8
    for each in children:
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("ModelService", "answers", UID)
        assert (owner["controller"], owner["blockOwnerDeletion"]) == (True, False)
        assert each["metadata"]["labels"]["spotune.dev/service"] == "answers"
    assert len({(each["kind"], each["metadata"]["name"]) for each in children}) == len(children)


def test_no_job_has_children_of_the_names_of_a_service() -> None:
    assert resolved_job_of().name.startswith("spotune-")
    assert child_name("answers") == "spotunems-answers"


@pytest.mark.parametrize("name", ["7b", "a" * 33, "a" * 34, "1" * 40, f"{'a' * 23}-{'b' * 16}"])
def test_child_name_of_any_service_is_valid_for_kuberay(name: str) -> None:
    """KubeRay appends 6 characters, and cuts a longer name than 50 for the Secret of the cluster."""
    found = child(resolved_service_of(name=name), "RayService")["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(found) + 6 <= 50


def test_long_names_of_services_stay_different() -> None:
    names = [f"{'a' * 39}{last}" for last in "bcd"]
    assert len({child_name(name) for name in names}) == 3


def test_clients_connect_to_the_gateway_alone() -> None:
    resolved = resolved_service_of(capacity="mixed", replicas={"min": 1, "max": 2})
    spec = child(resolved, "Service")["spec"]
    assert selected(resolved, spec["selector"]) == ["gateway"]
    assert spec["ports"] == [{"name": "http", "port": 80, "targetPort": 8000, "protocol": "TCP"}]
    assert spec["type"] == "ClusterIP"


def test_clients_connect_to_the_active_cluster_during_an_upgrade() -> None:
    selector = child(resolved_service_of(options={"active_cluster": "spotunems-answers-x7k2p"}), "Service")["spec"]
    assert selector["selector"]["ray.io/cluster"] == "spotunems-answers-x7k2p"
    assert "ray.io/cluster" not in child(resolved_service_of(), "Service")["spec"]["selector"]


def test_only_the_service_kuberay_and_the_operator_reach_all_pods() -> None:
    resolved = resolved_service_of()
    policy = child(resolved, "NetworkPolicy", "spotunems-answers")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert len(selected(resolved, policy["podSelector"]["matchLabels"])) == len(templates(resolved))
    own, kuberay, operator = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    assert kuberay["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}
    assert ports(kuberay) == [8265]
    namespace = operator["from"][0]["namespaceSelector"]["matchLabels"]
    assert namespace == {"kubernetes.io/metadata.name": "spotune-system"}
    assert ports(operator) == [8265, 8000]


def test_prometheus_reaches_the_metrics_of_all_pods() -> None:
    resolved = resolved_service_of(options={"monitoring_namespace": "monitoring"})
    assert ports(rules(resolved)[-1]) == [8080]
    assert len(rules(resolved)) == len(rules(resolved_service_of())) + 1


@pytest.mark.parametrize("front", [{"ingress": INGRESS}, {"httpRoute": HTTP_ROUTE}], ids=["ingress", "httpRoute"])
def test_all_pods_of_the_cluster_reach_the_gateway_and_from_outside_everybody(front: dict[str, Any]) -> None:
    inside, outside = resolved_service_of(), resolved_service_of(**front)
    name = "spotunems-answers-gateway"
    assert rules(inside, name) == [{"from": [{"namespaceSelector": {}}], "ports": [{"port": 8000, "protocol": "TCP"}]}]
    assert rules(outside, name) == [{"ports": [{"port": 8000, "protocol": "TCP"}]}]
    labels = child(inside, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
    assert selected(inside, labels) == ["gateway"]


def test_a_drain_of_nodes_takes_one_gateway_pod_at_a_time() -> None:
    resolved = resolved_service_of(gateway={"replicas": 3})
    spec = child(resolved, "PodDisruptionBudget")["spec"]
    assert selected(resolved, spec["selector"]["matchLabels"]) == ["gateway"]
    assert spec["minAvailable"] == 2
    assert "maxUnavailable" not in spec, "a RayCluster has no scale, so it would forbid every eviction"


def test_the_node_of_a_single_gateway_pod_can_be_drained() -> None:
    assert "PodDisruptionBudget" not in [each["kind"] for each in build_service_children(resolved_service_of())]


def test_ingress_leads_to_the_service() -> None:
    given = INGRESS | {"className": "nginx", "tlsSecretName": "tls", "annotations": {"a": "b"}}
    resolved = resolved_service_of(ingress=given)
    found = child(resolved, "Ingress")
    assert found["metadata"]["annotations"] == {"a": "b"}
    (rule,) = found["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = child(resolved, "Service")
    assert (rule["host"], path["path"], path["pathType"]) == ("models.example.com", "/", "Prefix")
    port = service["spec"]["ports"][0]["name"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": port}}
    assert found["spec"]["ingressClassName"] == "nginx"
    assert found["spec"]["tls"] == [{"hosts": ["models.example.com"], "secretName": "tls"}]


def test_ingress_of_the_default_class_without_tls() -> None:
    found = child(resolved_service_of(ingress=INGRESS), "Ingress")
    assert set(found["spec"]) == {"rules"}
    assert "annotations" not in found["metadata"]


def test_http_route_leads_to_the_service() -> None:
    parents = [{"name": "public", "namespace": "gateways", "sectionName": "https"}, {"name": "internal"}]
    resolved = resolved_service_of(httpRoute=HTTP_ROUTE | {"parentRefs": parents, "annotations": {"a": "b"}})
    found = child(resolved, "HTTPRoute")
    assert found["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert found["metadata"]["annotations"] == {"a": "b"}
    assert found["spec"]["hostnames"] == ["api.example.com", "api.example.org"]
    gateway = {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
    assert found["spec"]["parentRefs"] == [gateway | parent for parent in parents]
    (rule,) = found["spec"]["rules"]
    (match,), (backend,) = rule["matches"], rule["backendRefs"]
    assert match == {"path": {"type": "PathPrefix", "value": "/"}}
    service = child(resolved, "Service")
    assert (backend["kind"], backend["name"]) == ("Service", service["metadata"]["name"])
    assert backend["port"] == service["spec"]["ports"][0]["port"]


def test_a_gateway_ends_no_stream_unless_its_controller_rejects_the_field() -> None:
    (rule,) = child(resolved_service_of(httpRoute=HTTP_ROUTE), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    given = HTTP_ROUTE | {"disableTimeout": False}
    (without,) = child(resolved_service_of(httpRoute=given), "HTTPRoute")["spec"]["rules"]
    assert without == {name: value for name, value in rule.items() if name != "timeouts"}


@pytest.mark.parametrize(
    ("front", "url"),
    [
        ({}, "http://spotunems-answers.team.svc"),
        ({"ingress": INGRESS}, "http://models.example.com"),
        ({"ingress": INGRESS | {"tlsSecretName": "tls"}}, "https://models.example.com"),
        ({"httpRoute": HTTP_ROUTE}, "https://api.example.com"),
        ({"httpRoute": HTTP_ROUTE | {"urlScheme": "http"}}, "http://api.example.com"),
        ({"httpRoute": HTTP_ROUTE, "ingress": INGRESS}, "https://api.example.com"),
    ],
)
def test_url_of_the_endpoint(front: dict[str, Any], url: str) -> None:
    assert resolved_service_of(**front).url == url


def test_metrics_of_ray_are_read_from_all_pods_and_those_of_the_gateway_once() -> None:
    spec = child(resolved_service_of(options={"monitoring_namespace": "monitoring"}), "PodMonitor")["spec"]
    ray, gateway = spec["podMetricsEndpoints"]
    assert ray == {"port": "metrics", "path": "/metrics"}
    assert gateway["port"] == "serve"
    (keep,) = gateway["relabelings"]
    assert (keep["regex"], keep["action"]) == ("gateway", "keep")
    assert spec["selector"]["matchLabels"] == {"spotune.dev/service": "answers"}


def test_image_is_the_services_else_the_operators_else_this_versions() -> None:
    options = {"images": DefaultImages.of("registry.example/ours:2"), "ray_version": "2.61.0"}

    def image_and_ray(**spec: Any) -> tuple[str, str]:
        resolved = resolved_service_of(options=options, **spec)
        return resolved.image, cluster(resolved)["rayVersion"]

    assert image_and_ray() == ("registry.example/ours:2", "2.61.0")
    assert image_and_ray(cluster={"image": "mine:1", "rayVersion": "2.59.0"}) == ("mine:1", "2.59.0")
    assert resolved_service_of().image.startswith("spotune/serve:")


@pytest.mark.parametrize(("engine", "image"), [("vllm", "serve-vllm"), ("transformers", "serve")])
def test_given_engine_chooses_the_image(engine: str, image: str) -> None:
    assert resolved_service_of(gpus=1, engine=engine).image.startswith(f"spotune/{image}:")


@pytest.mark.parametrize(
    ("gpus", "task", "image"),
    [
        (0, "causal", "serve"),
        (1, "causal", "serve-vllm"),
        (2, "", "serve-vllm"),
        (1, "seq2seq", "serve"),
    ],
)
def test_only_services_that_vllm_may_serve_get_its_image(gpus: int, task: str, image: str) -> None:
    resolved = resolved_service_of(gpus=gpus, task=task)
    containers = [each for pod in pods(resolved).values() for each in pod["containers"]]
    assert {each["image"].partition(":")[0] for each in containers} == {f"spotune/{image}"}
    assert resolved_service_of(gpus=gpus, task=task, cluster={"image": "mine:1"}).image == "mine:1"
