"""Checks of what ModelServices need: definitions, the operator's rights, and the objects that they name."""

import copy
from typing import Any

import pytest

from spotune.crd.definition import MODEL_SERVICES, custom_resource_definition
from spotune_operator.cli.doctor.check import Check, Forbidden, Verdict
from spotune_operator.cli.doctor.control_plane import ray_service_definition, service_definition
from spotune_operator.cli.doctor.references import named_objects
from spotune_operator.cli.doctor.service_references import references
from spotune_operator.cli.doctor.serving import OPERATOR_RIGHTS, serving
from spotune_operator.errors import NotFoundError, RefusedError
from tests.operator.cli.doctor.test_control_plane import deployment
from tests.operator.support.model_services import model_service

CORE = "/api/v1/namespaces/team"
FINETUNE_JOB = "/apis/spotune.dev/v1alpha1/namespaces/team/finetunejobs/job"


def found(check: Check) -> tuple[str, str]:
    return check.verdict.value, check.message


def published() -> dict[str, Any]:
    """The OpenAPI document of ModelServices as an API server publishes it."""
    definition = custom_resource_definition(MODEL_SERVICES)["spec"]["versions"][0]
    schema = copy.deepcopy(definition["schema"]["openAPIV3Schema"])
    return {"components": {"schemas": {"dev.spotune.v1alpha1.ModelService": schema}}}


def ray_services(*fields: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"properties": {field: {} for field in fields}}
    return {"components": {"schemas": {"io.ray.v1.RayService": {"properties": {"spec": spec}}}}}


def test_definition_of_services_is_compared_with_this_version() -> None:
    assert service_definition(published()).verdict is Verdict.PASSED
    assert service_definition(None).message.startswith("ModelServices are not defined in this cluster")
    older = published()
    spec = older["components"]["schemas"]["dev.spotune.v1alpha1.ModelService"]["properties"]["spec"]
    del spec["properties"]["replicas"]["properties"]["targetOngoingRequests"]
    expected = "the ModelService CRD is older than this spotune: it lacks spec.replicas.targetOngoingRequests"
    assert found(service_definition(older)) == ("warning", expected)


def test_ray_services_need_the_fields_of_a_recent_kuberay() -> None:
    fields = ("upgradeStrategy", "rayClusterDeletionDelaySeconds", "excludeHeadPodFromServeSvc")
    assert ray_service_definition(ray_services(*fields)).verdict is Verdict.PASSED
    assert ray_service_definition(None).message.startswith("RayServices are not defined in this cluster")
    check = ray_service_definition(ray_services(*fields[1:]))
    assert check.message == "the RayService CRD has no upgradeStrategy: KubeRay is too old to serve models"


def operator(**environment: str) -> dict[str, Any]:
    manifest = deployment("op", "spotune:1", name="spotune", component="operator")
    pod = manifest["spec"]["template"]["spec"]
    pod["serviceAccountName"] = "runner"
    pod["containers"][0]["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    return manifest


def judged(*denied: tuple[str, str]) -> Check:
    """The check for an operator with all rights except the given (verb, resource) pairs."""

    def create_review(body: dict[str, Any]) -> dict[str, Any]:
        assert (body["kind"], body["spec"]["user"]) == ("SubjectAccessReview", "system:serviceaccount:system:runner")
        asked = body["spec"]["resourceAttributes"]
        assert asked["namespace"] == "team"
        resource = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
        return {"status": {"allowed": (asked["verb"], resource) not in denied}}

    return serving([operator(SPOTUNE_OPERATOR_SERVING="true")], [model_service()], create_review)


def refused(body: dict[str, Any]) -> dict[str, Any]:
    raise RefusedError("you may not create subjectaccessreviews", 403)


@pytest.mark.parametrize(
    ("deployments", "services", "verdict", "message"),
    [
        (Forbidden("no"), [], "warning", "cannot check whether ModelServices are enabled: no"),
        ([], [], "warning", "cannot check whether ModelServices are enabled without the operator's Deployment"),
        ([operator()], [], "passed", "the operator runs without ModelServices (chart value serving.enabled)"),
        (
            [operator(SPOTUNE_OPERATOR_SERVING="false")],
            [model_service()],
            "failed",
            "the operator runs without ModelServices: the 1 of this namespace will not start",
        ),
        (
            [operator(SPOTUNE_OPERATOR_SERVING="true")],
            [],
            "passed",
            "the operator reconciles ModelServices; you may not check its rights",
        ),
    ],
)
def test_serving_is_enabled_in_the_chart(deployments: Any, services: Any, verdict: str, message: str) -> None:
    check = serving(deployments, services, refused)
    assert found(check) == (verdict, message)
    assert ("--set serving.enabled=true" in check.remedy) is (verdict == "failed")


def test_operator_with_all_rights_passes() -> None:
    assert found(judged()) == ("passed", "the operator reconciles ModelServices, and has the rights for them")


@pytest.mark.parametrize("right", OPERATOR_RIGHTS, ids=lambda right: right.resource)
def test_each_missing_right_of_the_operator_is_named(right: Any) -> None:
    check = judged(*((verb, right.resource) for verb in right.verbs))
    expected = f"the operator may not {' and '.join(right.verbs)} {right.resource} ({right.purpose})"
    assert found(check) == ("failed", expected)
    assert "rbac.create" in check.remedy


def examined(objects: dict[str, dict[str, Any]], hidden: tuple[str, ...] = (), **spec: Any) -> list[Check]:
    """The checks of a service that serves the job ``job`` unless the spec says otherwise."""

    def get(path: str) -> dict[str, Any]:
        if path.startswith(hidden) and hidden:
            raise RefusedError("you may not get it", 403)
        if path not in objects:
            raise NotFoundError("not found", 404)
        return objects[path]

    service = model_service()
    service["spec"] |= spec
    return list(named_objects("services", "ModelService", [service], references, get))


def test_without_services_nothing_is_checked() -> None:
    assert list(named_objects("services", "ModelService", [], references, lambda _: {})) == []


def test_a_service_whose_objects_exist_passes() -> None:
    spec: dict[str, Any] = {
        "adapters": [{"name": "sql", "claim": {"name": "lora", "path": "."}}],
        "apiKeysSecretRef": {"name": "keys", "key": "keys"},
        "priorityClassName": "high",
        "ingress": {"host": "models.example.com", "className": "nginx"},
        "httpRoute": {"hostnames": ["a.b"], "parentRefs": [{"name": "own"}, {"name": "public", "namespace": "infra"}]},
        "cluster": {"redisAddress": "redis.databases.svc.cluster.local:6379"},
    }
    objects: dict[str, dict[str, Any]] = {
        FINETUNE_JOB: {},
        f"{CORE}/persistentvolumeclaims/lora": {},
        f"{CORE}/secrets/keys": {"data": {"keys": "c2VjcmV0"}},
        "/apis/scheduling.k8s.io/v1/priorityclasses/high": {},
        "/apis/networking.k8s.io/v1/ingressclasses/nginx": {},
        "/apis/gateway.networking.k8s.io/v1/namespaces/team/gateways/own": {},
        "/apis/gateway.networking.k8s.io/v1/namespaces/infra/gateways/public": {},
        "/api/v1/namespaces/databases/services/redis": {"spec": {"ports": [{"port": 6379}]}},
    }
    assert [found(check) for check in examined(objects, **spec)] == [
        ("passed", "all objects that the 1 ModelService(s) name exist")
    ]
    for path in objects:
        (check,) = examined({key: value for key, value in objects.items() if key != path}, **spec)
        assert f"there is no {path_kind(path)} {path.rpartition('/')[2]}" in check.message
        assert check.remedy


def path_kind(path: str) -> str:
    kinds = {
        "finetunejobs": "FinetuneJob",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "secrets": "Secret",
        "priorityclasses": "PriorityClass",
        "ingressclasses": "IngressClass",
        "gateways": "Gateway",
        "services": "Service",
    }
    return kinds[path.split("/")[-2]]


def test_a_missing_job_or_class_of_an_ingress_is_a_warning_and_a_missing_secret_a_failure() -> None:
    spec: dict[str, Any] = {
        "apiKeysSecretRef": {"name": "keys", "key": "keys"},
        "ingress": {"host": "h", "className": "nginx"},
    }
    assert [found(check) for check in examined({}, **spec)] == [
        ("warning", "answers: spec.model.finetuneJob: there is no FinetuneJob job: the service waits for it"),
        ("failed", "answers: spec.apiKeysSecretRef: there is no Secret keys: pods that need it do not start"),
        (
            "warning",
            "answers: spec.ingress.className: there is no IngressClass nginx: no controller handles the Ingress",
        ),
    ]


def test_a_missing_gateway_is_a_warning_that_names_its_namespace_and_the_gateway_api() -> None:
    route = {"hostnames": ["a.b"], "parentRefs": [{"name": "public", "namespace": "infra"}]}
    (check,) = examined({FINETUNE_JOB: {}}, httpRoute=route)
    effect = "no traffic reaches the HTTPRoute (namespace infra)"
    message = f"answers: spec.httpRoute.parentRefs[0]: there is no Gateway public: {effect}"
    assert found(check) == ("warning", message)
    assert "install the Gateway API" in check.remedy


def test_a_secret_without_the_key_is_named_without_its_content() -> None:
    objects = {FINETUNE_JOB: {}, f"{CORE}/secrets/keys": {"data": {"other": "c2VjcmV0"}}}
    (check,) = examined(objects, apiKeysSecretRef={"name": "keys", "key": "keys"})
    assert "Secret keys has no key keys" in check.message
    assert "--from-file=keys=FILE" in check.remedy
    assert "c2VjcmV0" not in check.message + check.remedy


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("redis:6379", "there is no Service redis"),
        ("redis.team.svc:6380", "Service redis has no port 6380"),
        ("redis.example.com:6379", ""),
        ("10.0.0.7:6379", ""),
        ("[::1]:6379", ""),
        ("", ""),
    ],
)
def test_redis_in_the_cluster_has_a_service(address: str, message: str) -> None:
    service = {"spec": {"ports": [{"port": 6379}]}}
    objects = {FINETUNE_JOB: {}, f"{CORE}/services/redis": service} if "svc" in address else {FINETUNE_JOB: {}}
    (check,) = examined(objects, cluster={"redisAddress": address})
    assert message in check.message
    assert check.verdict is (Verdict.FAILED if message else Verdict.PASSED)


def test_objects_that_the_user_may_not_see_are_listed_once() -> None:
    spec: dict[str, Any] = {"apiKeysSecretRef": {"name": "keys", "key": "keys"}, "priorityClassName": "high"}
    hidden = (f"{CORE}/secrets", "/apis/scheduling")
    (check,) = examined({FINETUNE_JOB: {}}, hidden, **spec)
    assert found(check) == ("warning", "you may not check whether these exist: Secret keys, PriorityClass high")
