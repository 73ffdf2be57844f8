"""The RayService: groups and their sizes, what makes a new cluster, and the configuration of Ray Serve."""

import ast
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from spotune.service import ReplicasSpec
from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.groups import group_sizes
from spotune_operator.children.serving.ray_service import CLUSTER_ANNOTATION, cluster_digest
from spotune_operator.children.serving.resolved_service import DeployedVersion, ModelLocation, ResolvedService
from spotune_operator.providers import AKS, EKS, GKE, NONE, Provider
from tests import ROOT
from tests.operator.support.resolved_services import (
    BUCKET,
    HUB,
    TRAINED,
    child,
    cluster,
    gateway_application,
    groups,
    model_application,
    resolved_service_of,
    serve_content,
    templates,
)

SERVING = ROOT / "serve/spotune_serve/deployment"


def arguments(resolved: ResolvedService) -> dict[str, Any]:
    """The arguments of the model's application."""
    found: dict[str, Any] = model_application(resolved)["args"]
    return found


def gateway_arguments(resolved: ResolvedService) -> dict[str, Any]:
    found: dict[str, Any] = gateway_application(resolved)["args"]
    return found


def deployments(resolved: ResolvedService) -> dict[str, dict[str, Any]]:
    """The options of the deployments by name."""
    applications = serve_content(resolved)["applications"]
    return {options["name"]: options for each in applications for options in each["deployments"]}


def listed(resolved: ResolvedService) -> list[dict[str, Any]]:
    """The versions that the gateway knows."""
    found: list[dict[str, Any]] = deployments(resolved)["Gateway"]["user_config"]["versions"]
    return found


def ray_resources(parameters: dict[str, str]) -> dict[str, int]:
    """The custom Ray resources in the parameters of `ray start`."""
    text = parameters["resources"]
    assert text[0] == text[-1] == "'", "it is a word of a shell command"
    found: dict[str, int] = json.loads(text[1:-1])
    return found


def without_sizes(resolved: ResolvedService) -> dict[str, Any]:
    """All of the RayCluster whose change makes KubeRay start a new one."""
    config = cluster(resolved)
    for group in config["workerGroupSpecs"]:
        for name in ("replicas", "minReplicas", "maxReplicas"):
            del group[name]
    return config


def sizes(resolved: ResolvedService) -> dict[str, tuple[int, int]]:
    return {size.name: (size.min, size.max) for size in group_sizes(resolved)}


def test_each_pod_offers_its_own_ray_resource_and_the_head_none() -> None:
    found = groups(resolved_service_of(AKS, gpus=2, capacity="mixed", replicas={"min": 1, "max": 3}))
    resources = {name: ray_resources(group["rayStartParams"]) for name, group in found.items()}
    replica = {"spotune_replica": 1}
    assert resources == {"gateway": {"spotune_gateway": 1}, "on-demand": replica, "spot": replica}
    gpus = {name: group["rayStartParams"]["num-gpus"] for name, group in found.items()}
    assert gpus == {"gateway": "0", "on-demand": "2", "spot": "2"}
    head = cluster(resolved_service_of())["headGroupSpec"]["rayStartParams"]
    assert head["num-cpus"] == "0"
    assert "resources" not in head


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_fixed_number_of_replicas(capacity: str) -> None:
    resolved = resolved_service_of(AKS, capacity=capacity, replicas={"min": 3, "max": 3}, gateway={"replicas": 2})
    assert sizes(resolved) == {"gateway": (2, 2), capacity: (3, 3)}
    assert {name: group["replicas"] for name, group in groups(resolved).items()} == {"gateway": 2, capacity: 3}
    assert cluster(resolved)["enableInTreeAutoscaling"] is False
    assert "autoscalerOptions" not in cluster(resolved)
    assert deployments(resolved)["Replica"] == {"name": "Replica", "num_replicas": 3}


@pytest.mark.parametrize(
    ("base", "minimum", "maximum", "on_demand", "spot"),
    [
        (1, 3, 3, (1, 1), (2, 2)),
        (3, 3, 3, (3, 3), (0, 0)),
        (1, 2, 6, (1, 1), (1, 5)),
        (2, 1, 4, (1, 2), (0, 2)),
        (2, 0, 4, (0, 2), (0, 2)),
    ],
)
def test_mixed_capacity_has_the_base_on_demand_and_the_others_on_spot(
    base: int, minimum: int, maximum: int, on_demand: tuple[int, int], spot: tuple[int, int]
) -> None:
    replicas = {"min": minimum, "max": maximum}
    resolved = resolved_service_of(AKS, capacity="mixed", onDemandBase=base, replicas=replicas)
    assert sizes(resolved) == {"gateway": (1, 1), "on-demand": on_demand, "spot": spot}
    assert on_demand[0] + spot[0] == minimum
    assert on_demand[1] + spot[1] == maximum


def test_replicas_that_follow_the_load_have_limits_for_pods_and_for_ray_serve() -> None:
    resolved = resolved_service_of(replicas={"min": 1, "max": 4, "targetOngoingRequests": 6})
    group = groups(resolved)["spot"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 4)
    assert cluster(resolved)["enableInTreeAutoscaling"] is True
    options = deployments(resolved)["Replica"]
    assert options["num_replicas"] == "auto"
    limits = {"min_replicas": 1, "initial_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 6}
    assert limits.items() <= options["autoscaling_config"].items()


def test_the_last_replica_stays_twice_as_long_as_the_others() -> None:
    resolved = resolved_service_of(replicas={"min": 0, "max": 2, "scaleDownDelay": "90s"})
    config = deployments(resolved)["Replica"]["autoscaling_config"]
    assert (config["downscale_delay_s"], config["downscale_to_zero_delay_s"]) == (90, 180)


def test_a_service_that_scales_to_zero_starts_with_one_replica_and_its_gateway_knows_it() -> None:
    resolved = resolved_service_of(replicas={"min": 0, "max": 4})
    config = deployments(resolved)["Replica"]["autoscaling_config"]
    assert (config["min_replicas"], config["initial_replicas"]) == (0, 1)
    assert gateway_arguments(resolved)["scalesToZero"] is True
    assert gateway_arguments(resolved_service_of(replicas={"min": 1, "max": 4}))["scalesToZero"] is False


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"replicas": {"min": 1, "max": 1}}, {"replicas": {"min": 5, "max": 5}}),
        ({"replicas": {"min": 1, "max": 3}}, {"replicas": {"min": 2, "max": 9, "targetOngoingRequests": 32}}),
        ({"gateway": {"replicas": 1}}, {"gateway": {"replicas": 3}}),
        (
            {"capacity": "mixed", "onDemandBase": 1, "replicas": {"min": 1, "max": 1}},
            {"capacity": "mixed", "onDemandBase": 2, "replicas": {"min": 4, "max": 4}},
        ),
    ],
)
def test_scaling_keeps_the_cluster_and_restarts_no_process(before: dict[str, Any], after: dict[str, Any]) -> None:
    """KubeRay ignores the sizes of groups, and Ray Serve restarts processes when the arguments change."""
    old, new = resolved_service_of(AKS, **before), resolved_service_of(AKS, **after)
    assert sizes(old) != sizes(new)
    assert deployments(old) != deployments(new)
    assert without_sizes(old) == without_sizes(new)
    assert (arguments(old), gateway_arguments(old)) == (arguments(new), gateway_arguments(new))


@pytest.mark.parametrize(
    "changed",
    [
        {"location": HUB},
        {"adapters": {"sql": ModelLocation("exports", "sql")}},
        {"requestTimeout": "1m"},
        {"apiKeysSecretRef": {"name": "keys", "key": "keys"}},
        {"replicas": {"min": 0, "max": 1}},
        {"cluster": {"image": "other"}},
        {"podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}}},
    ],
)
def test_what_would_restart_all_processes_makes_a_new_cluster(changed: dict[str, Any]) -> None:
    """KubeRay brings the new cluster up beside the old one. A changed argument alone would interrupt the service."""
    assert without_sizes(resolved_service_of(**changed)) != without_sizes(resolved_service_of())
    assert cluster(resolved_service_of())["workerGroupSpecs"][0]["template"]["metadata"]["annotations"]


@pytest.mark.parametrize(
    "changed",
    [
        {"location": ModelLocation(TRAINED.claim, TRAINED.path, version="job-01234567-step-18")},
        {"location": ModelLocation(TRAINED.claim, "elsewhere", version=TRAINED.version)},
        {"adapters": {"sql": TRAINED}},
        {"adapters": {"sql": ModelLocation(TRAINED.claim, TRAINED.path, version="2")}},
    ],
)
def test_another_version_on_a_mounted_claim_is_another_application_in_the_same_cluster(changed: dict[str, Any]) -> None:
    old, new = resolved_service_of(), resolved_service_of(**changed)
    assert model_application(old)["name"] != model_application(new)["name"]
    assert without_sizes(old) == without_sizes(new)
    assert gateway_arguments(old) == gateway_arguments(new)
    assert cluster_digest(old) == cluster_digest(new)


def test_the_digest_of_the_cluster_changes_with_a_pod_and_not_with_its_size() -> None:
    digests = {
        cluster_digest(resolved_service_of(**spec))
        for spec in ({}, {"replicas": {"min": 3, "max": 3}}, {"requestTimeout": "1m"})
    }
    assert len(digests) == 2
    annotations = child(resolved_service_of(), "RayService")["metadata"]["annotations"]
    assert annotations[CLUSTER_ANNOTATION] in digests


def versions_of(*weights: int | None) -> list[DeployedVersion]:
    """Versions of a model with one more replica each."""
    locations = [ModelLocation("exports", f"v{number}", version=f"v{number}") for number in range(len(weights))]
    return [
        DeployedVersion(f"model-{number}", location.version, location, {}, weight, ReplicasSpec(min=1, max=number + 1))
        for number, (weight, location) in enumerate(zip(weights, locations, strict=True))
    ]


def test_each_version_is_an_application_and_the_gateway_knows_those_with_a_weight() -> None:
    resolved = replace(resolved_service_of(replicas={"min": 1, "max": 2}), versions=versions_of(90, 10, None))
    applications = serve_content(resolved)["applications"]
    assert [each["name"] for each in applications] == ["spotune", "model-0", "model-1", "model-2"]
    assert [each["route_prefix"] for each in applications] == ["/", None, None, None]
    assert [each["args"].get("directory") for each in applications][1:] == [f"/models/exports/v{n}" for n in range(3)]
    assert [(each["version"], each["weight"]) for each in listed(resolved)] == [("v0", 90), ("v1", 10)]


def test_groups_have_pods_for_all_versions() -> None:
    resolved = replace(resolved_service_of(AKS), versions=versions_of(90, 10, None))
    assert sizes(resolved)["spot"] == (3, 6)
    mixed = replace(resolved_service_of(AKS, capacity="mixed"), versions=versions_of(90, 10, None))
    assert (sizes(mixed)["on-demand"], sizes(mixed)["spot"]) == ((1, 1), (2, 5))


def test_the_old_cluster_of_an_upgrade_is_kept_for_the_longest_request() -> None:
    spec = child(resolved_service_of(requestTimeout="90s"), "RayService")["spec"]
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert spec["rayClusterDeletionDelaySeconds"] == 90


def test_ray_requires_a_token() -> None:
    assert cluster(resolved_service_of())["authOptions"] == {"mode": "token"}


def test_clients_connect_to_the_gateway_without_a_proxy_of_ray_serve() -> None:
    content = serve_content(resolved_service_of())
    assert content["proxy_location"] == "Disabled"
    assert gateway_arguments(resolved_service_of())["port"] == 8000
    gateway, model = gateway_application(resolved_service_of()), model_application(resolved_service_of())
    assert gateway["import_path"] == "spotune_serve.deployment.cluster:build_gateway"
    assert model["import_path"] == "spotune_serve.deployment.cluster:build_model"


def test_arguments_of_a_trained_model_are_as_few_as_possible() -> None:
    directory = "/models/spotune-job/team/job-01234567/export"
    resolved = resolved_service_of(EKS)
    assert arguments(resolved) == {"directory": directory, "step": 9, "gpus": 0, "drainSeconds": 113}
    assert gateway_arguments(resolved) == {
        "name": "answers",
        "port": 8000,
        "requestTimeoutSeconds": 600,
        "drainSeconds": 113,
        "scalesToZero": False,
    }
    application = model_application(resolved)["name"]
    version = {
        "directory": directory,
        "revision": "",
        "adapters": {},
        "version": TRAINED.version,
        "weight": 100,
        "step": 9,
    }
    assert listed(resolved) == [{"application": application} | version]


def test_arguments_of_a_model_of_the_hub_with_keys() -> None:
    model = {"source": HUB.source, "revision": "v1", "name": "small"}
    keys = {"name": "keys", "key": "all"}
    resolved = resolved_service_of(location=HUB, model=model, apiKeysSecretRef=keys, gpus=1, requestTimeout="1500ms")
    named = {"directory": "hf://google-t5/t5-small", "revision": "v1"}
    assert arguments(resolved).items() >= (named | {"gpus": 1}).items()
    assert listed(resolved)[0].items() >= named.items()
    gateway = {"name": "small", "apiKeysFile": "/etc/spotune/api-keys/keys", "requestTimeoutSeconds": 2}
    assert gateway_arguments(resolved).items() >= gateway.items()


def test_a_model_in_a_bucket_has_no_revision_and_the_service_account_of_the_service() -> None:
    resolved = resolved_service_of(AKS, location=BUCKET, serviceAccountName="reader")
    named = {"directory": "s3://models/team/llama", "revision": ""}
    assert arguments(resolved).items() >= {"directory": "s3://models/team/llama"}.items()
    assert "revision" not in arguments(resolved)
    assert listed(resolved)[0].items() >= (named | {"version": "team/llama"}).items()
    for name, template in templates(resolved).items():
        if name != "head":
            assert template["spec"]["serviceAccountName"] == "reader"
            assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
            assert not template["spec"].get("volumes") or "persistentVolumeClaim" not in str(
                template["spec"]["volumes"]
            )


def test_adapters_are_folders_by_model_id() -> None:
    adapters = {"sql": ModelLocation("exports", "/team/sql/"), "chat": TRAINED}
    folders = {"sql": "/models/exports/team/sql", "chat": "/models/spotune-job/team/job-01234567/export"}
    resolved = resolved_service_of(adapters=adapters)
    assert arguments(resolved)["adapters"] == folders
    assert listed(resolved)[0]["adapters"] == folders


@pytest.mark.parametrize("provider", [AKS, EKS, GKE, NONE], ids=lambda provider: provider.name)
@pytest.mark.parametrize("capacity", ["spot", "on-demand", "mixed"])
def test_requests_drain_before_ray_stops_and_ray_before_the_pod_is_killed(provider: Provider, capacity: str) -> None:
    resolved = resolved_service_of(provider, capacity=capacity)
    drain = arguments(resolved)["drainSeconds"]
    assert gateway_arguments(resolved)["drainSeconds"] == drain
    for name, template in templates(resolved).items():
        if name == "head":
            continue
        variables = {item["name"]: item.get("value") for item in template["spec"]["containers"][0]["env"]}
        ray_drain = int(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] or 0)
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert 0 < drain < ray_drain < grace
        assert name != "spot" or grace <= provider.notice_seconds
    assert templates(resolved)["gateway"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_redis_keeps_the_state_of_ray() -> None:
    password = {"name": "redis", "key": "password"}
    given = {"redisAddress": "redis:6379", "redisPasswordSecretRef": password}
    options = cluster(resolved_service_of(cluster=given))["gcsFaultToleranceOptions"]
    assert options == {"redisAddress": "redis:6379", "redisPassword": {"valueFrom": {"secretKeyRef": password}}}
    assert "gcsFaultToleranceOptions" not in cluster(resolved_service_of())


def test_a_suspended_service_has_no_ray_service_and_keeps_its_endpoint() -> None:
    running, suspended = (
        [each["kind"] for each in build_service_children(resolved_service_of(suspend=suspend))]
        for suspend in (False, True)
    )
    assert "RayService" in running
    assert suspended == [kind for kind in running if kind != "RayService"]
    assert "Service" in suspended


def assigned(module: str) -> dict[str, Any]:
    """The constants of a module of `spotune_serve` by name; the module itself needs Ray."""
    tree = ast.parse((SERVING / module).read_text())
    return {
        node.target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.target, ast.Name)
    }


def fields_of(section: str) -> set[str]:
    """The camelCase fields of a section in `spotune_serve`, with those of its bases."""
    tree = ast.parse((SERVING / "arguments.py").read_text())
    sections = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    names = [section]
    for name in names:
        names += [base.id for base in sections[name].bases if isinstance(base, ast.Name) and base.id in sections]
        fields = [each.target for each in sections[name].body if isinstance(each, ast.AnnAssign)]
        found |= {to_camel(each.id) for each in fields if isinstance(each, ast.Name)}
    return found


def test_names_are_those_of_the_applications() -> None:
    names = assigned("application.py") | assigned("application_backend.py")
    resources = assigned("arguments.py")
    resolved = resolved_service_of()
    assert set(deployments(resolved)) == {names["GATEWAY"], names["REPLICA"]}
    offered = {name for group in groups(resolved).values() for name in ray_resources(group["rayStartParams"])}
    assert offered == {resources["GATEWAY_RESOURCE"], resources["REPLICA_RESOURCE"]}


def test_every_argument_is_one_of_the_applications() -> None:
    everything = resolved_service_of(
        location=HUB,
        adapters={"sql": TRAINED},
        replicas={"min": 0, "max": 2},
        apiKeysSecretRef={"name": "keys", "key": "keys"},
    )
    assert {"revision", "adapters"} <= arguments(everything).keys() <= fields_of("ModelArguments")
    assert "apiKeysFile" in gateway_arguments(everything)
    assert gateway_arguments(everything).keys() == fields_of("GatewayArguments")
    assert listed(everything)[0].keys() | {"step"} == fields_of("ListedVersion")


def test_engine_settings_reach_the_model_and_start_a_second_cluster() -> None:
    plain = resolved_service_of(gpus=1, cluster={"image": "mine:1"})
    chosen = resolved_service_of(gpus=1, cluster={"image": "mine:1"}, engine="vllm", batchInvariant=True)
    assert arguments(chosen) == arguments(plain) | {"engine": "vllm", "batchInvariant": True}
    assert without_sizes(chosen) != without_sizes(plain)
