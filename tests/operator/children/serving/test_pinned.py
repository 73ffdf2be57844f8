"""The pin of a service: another version of the operator changes neither pods nor arguments of a running cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from spotune.service import ModelServiceSpec
from spotune_operator.children.serving import pinned, pods, serve_config
from spotune_operator.children.serving.groups import group_sizes
from spotune_operator.children.serving.ray_service import cluster_digest, pin
from spotune_operator.children.serving.resolved_service import DefaultImages, ModelLocation, ResolvedService
from spotune_operator.providers import AKS, NONE
from tests.operator.support.resolved_services import HUB, child, groups, resolved_service_of, serve_content

KEYS = {"apiKeysSecretRef": {"name": "keys", "key": "keys"}}
MIXED = {"capacity": "mixed", "onDemandBase": 1, "replicas": {"min": 1, "max": 4}}


def pinned_to(resolved: ResolvedService, former: ResolvedService) -> ResolvedService:
    """A service with the pin of a former one."""
    return replace(resolved, pinned=pin(former))


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to get other pod templates and arguments, as of another version of the operator."""

    def change() -> None:
        monkeypatch.setitem(pods._LOGS, "RAY_NEW_SETTING", "1")
        monkeypatch.setattr(serve_config, "_NOTICE_DELAY_SECONDS", 4)

    return change


@pytest.mark.parametrize("spec", [{}, KEYS, MIXED, {"location": HUB}, {"replicas": {"min": 0, "max": 2}}], ids=str)
def test_pinned_service_has_the_children_that_were_rendered(spec: dict[str, Any]) -> None:
    resolved = resolved_service_of(AKS, **spec)
    assert child(pinned_to(resolved, resolved), "RayService") == child(resolved, "RayService")


@pytest.mark.parametrize("spec", [{}, KEYS, MIXED], ids=str)
def test_upgraded_operator_changes_no_cluster_that_is_pinned(spec: dict[str, Any], upgrade: Any) -> None:
    former = resolved_service_of(AKS, **spec)
    before, pinned_by_former = child(former, "RayService"), pin(former)
    upgrade()
    assert cluster_digest(former) != before["metadata"]["annotations"]["spotune.dev/cluster"]
    assert serve_content(former) != serve_content(replace(former, pinned=pinned_by_former))
    assert child(replace(former, pinned=pinned_by_former), "RayService") == before
    assert pin(replace(former, pinned=pinned_by_former)) == pinned_by_former


def test_cluster_whose_groups_have_other_names_now_is_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    former = resolved_service_of(capacity="spot")
    pinned_by_former = pin(former)
    renamed = [replace(size, name=f"{size.name}-nodes") for size in group_sizes(former)]
    for module in (pinned, sys.modules[pin.__module__]):
        monkeypatch.setattr(module, "group_sizes", lambda _resolved: renamed)
    assert set(groups(replace(former, pinned=pinned_by_former))) == {"gateway-nodes", "spot-nodes"}


def test_gateways_of_an_earlier_version_keep_the_proxies_of_ray_serve() -> None:
    """They have no port of their own."""
    former = resolved_service_of()
    arguments = json.loads(pin(former).arguments)
    del arguments["gateway"]["port"]
    earlier = pin(former).model_copy(update={"arguments": json.dumps(arguments)})
    content = serve_content(replace(former, pinned=earlier))
    assert content["proxy_location"] == "EveryNode"
    assert content["http_options"].items() >= {"host": "0.0.0.0", "port": 8000}.items()


def test_pinned_cluster_has_the_numbers_of_pods_of_the_spec(upgrade: Any) -> None:
    former = resolved_service_of(capacity="spot", replicas={"min": 1, "max": 1})
    pinned_by_former, digest = pin(former), cluster_digest(former)
    upgrade()
    scaled = resolved_service_of(capacity="spot", replicas={"min": 3, "max": 3}, gateway={"replicas": 2})
    scaled = replace(scaled, pinned=pinned_by_former)
    assert {name: group["replicas"] for name, group in groups(scaled).items()} == {"gateway": 2, "spot": 3}
    assert {name: group["maxReplicas"] for name, group in groups(scaled).items()} == {"gateway": 2, "spot": 3}
    assert cluster_digest(scaled) == digest


@pytest.mark.parametrize(
    "changed",
    [
        {"location": HUB},
        {"adapters": {"sql": ModelLocation("exports", "sql")}},
        {"name": "other"},
        {"model": {"finetuneJob": "job", "name": "other"}},
        {"replicas": {"min": 1, "max": 2}},
        {"replicas": {"min": 0, "max": 1}},
        {"gpus": 1},
        {"capacity": "on-demand"},
        {"resources": {"requests": {"memory": "9Gi"}}},
        {"priorityClassName": "serving"},
        {"serviceAccountName": "reader"},
        {"podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}}},
        {"gateway": {"resources": {"requests": {"memory": "9Gi"}}}},
        {"gateway": {"podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}}}},
        KEYS,
        {"requestTimeout": "1m"},
        {"cluster": {"image": "other"}},
        {"cluster": {"rayVersion": "2.61.0"}},
        {"cluster": {"redisAddress": "redis:6379"}},
        {"options": {"images": DefaultImages("other", "other")}},
    ],
    ids=str,
)
def test_change_of_the_spec_renders_the_cluster_again(changed: dict[str, Any], upgrade: Any) -> None:
    former = pin(resolved_service_of())
    upgrade()
    fresh = resolved_service_of(**changed)
    assert child(replace(fresh, pinned=former), "RayService") == child(fresh, "RayService")
    assert pin(replace(fresh, pinned=former)) == pin(fresh) != former


def test_token_for_the_hub_renders_the_cluster_again() -> None:
    private = {"source": HUB.source, "tokenSecretRef": {"name": "hub", "key": "token"}}
    former, now = resolved_service_of(location=HUB), resolved_service_of(location=HUB, model=private)
    assert cluster_digest(now) != cluster_digest(former)
    assert cluster_digest(pinned_to(now, former)) == cluster_digest(now)


def test_another_provider_renders_the_cluster_again() -> None:
    assert pinned.matching_pin(pinned_to(resolved_service_of(NONE), resolved_service_of(AKS))) is None


UNRELATED: dict[str, dict[str, Any]] = {
    "adapters": {"adapters": {"sql": ModelLocation("spotune-job", "sql")}},
    "httpRoute": {"httpRoute": {"hostnames": ["sql.example.org"], "parentRefs": [{"name": "public"}]}},
    "ingress": {"ingress": {"host": "sql.example.org"}},
    "model": {"model": {"finetuneJob": "another"}},
    "onDemandBase": {"onDemandBase": 2},
    "rollout": {"rollout": {"pause": "1m"}},
    "suspend": {},  # a suspended service has no cluster
}


def test_fields_without_pods_are_fields_of_the_spec() -> None:
    names = {field.alias or name for name, field in ModelServiceSpec.model_fields.items()}
    assert names >= UNRELATED.keys()
    assert UNRELATED.keys() == pinned._FIELDS_WITHOUT_PODS


@pytest.mark.parametrize("changed", UNRELATED.values(), ids=UNRELATED)
def test_fields_without_pods_change_no_cluster_and_keep_the_pin(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"capacity": "mixed", "replicas": {"min": 3, "max": 3}}
    former, now = resolved_service_of(**given), resolved_service_of(**given | changed)
    assert cluster_digest(now) == cluster_digest(former)
    assert pinned.inputs_digest(now) == pinned.inputs_digest(former)
