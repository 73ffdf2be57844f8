"""Nothing of a job in one namespace reaches another: no child, reference, network rule, cache, notification or sum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spotune.crd.definition import (
    FINETUNE_JOBS,
    FINETUNE_SWEEPS,
    MODEL_SERVICES,
    CustomResource,
    custom_resource_definition,
)
from spotune.job import FinetuneJob
from spotune_client.fleet.summary import fleet_of
from spotune_operator.children import build_children
from spotune_operator.children.network import network_policy
from spotune_operator.children.raycluster import Replicas
from spotune_operator.children.resolved_job import ResolvedJob, resolve
from spotune_operator.kube.phase_change import PhaseChange
from spotune_operator.notifications.targets import Target
from spotune_operator.providers import NONE
from tests.api.support.job_files import a_job

OPERATOR, MONITORING = "spotune-system", "monitoring"
SECRETS = {"model": {"tokenSecretRef": {"name": "hub-token", "key": "token"}}}


def job_in(namespace: str, **sections: Any) -> ResolvedJob:
    """The job `sql` of a namespace: all teams give their jobs the same name."""
    content = a_job(**sections).model_dump(exclude_unset=True)
    metadata = {"name": "sql", "namespace": namespace, "uid": f"uid-{namespace}"}
    job = FinetuneJob.model_validate(content | {"metadata": metadata})
    return resolve(job, NONE, operator_namespace=OPERATOR, monitoring_namespace=MONITORING)


def values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in an object with its path."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from values(item, (*path, str(key)))


def test_children_name_no_namespace_but_their_own() -> None:
    """A reference without a namespace, as those to Secrets and claims, is always within the pod's own."""
    for child in build_children(job_in("team-a"), Replicas(2)):
        namespaces = {
            path: value for path, value in values(child) if path[-1:] in (("namespace",), ("namespaces",)) and path[:-1]
        }
        own = {value for path, value in namespaces.items() if path == ("metadata", "namespace")}
        assert own <= {"team-a"}
        others = {path: value for path, value in namespaces.items() if path != ("metadata", "namespace")}
        assert others == {}, child["kind"]


def test_jobs_of_one_name_differ_in_nothing_but_their_namespace() -> None:
    """So neither finds its job directory, its volume or its pods by a name that the other has, too."""
    first, second = (
        json.dumps(build_children(job_in(name), Replicas(2)), sort_keys=True) for name in ("team-a", "team-b")
    )
    assert "team-b" not in first
    assert first != second
    assert first.replace("team-a", "team-b") == second
    (cluster,) = [child for child in build_children(job_in("team-a"), Replicas(2)) if child["kind"] == "RayCluster"]
    words = [value for _, value in values(cluster) if isinstance(value, str)]
    assert any("team-a/sql-" in word for word in words), "the job directory begins with the namespace"


def test_only_the_job_itself_the_operator_and_prometheus_get_in() -> None:
    """A peer without a namespaceSelector is in the policy's own namespace, whatever labels others give their pods."""
    resolved = job_in("team-a")
    peers = [peer for rule in network_policy(resolved)["spec"]["ingress"] for peer in rule["from"]]
    within = [peer for peer in peers if "namespaceSelector" not in peer]
    assert within == [{"podSelector": {"matchLabels": resolved.selector}}]
    names = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers if peer not in within
    ]
    assert sorted(names) == [MONITORING, OPERATOR]


def test_pods_have_no_identity_that_the_job_has_not_asked_for() -> None:
    for path, value in values(build_children(job_in("team-a"), Replicas(2))):
        assert path[-1:] != ("serviceAccountName",)
        if path[-1:] == ("automountServiceAccountToken",):
            assert value is False


@pytest.mark.parametrize("resource", [FINETUNE_JOBS, MODEL_SERVICES, FINETUNE_SWEEPS], ids=lambda each: each.kind)
def test_no_field_of_a_spec_but_that_of_a_gateway_names_a_namespace(resource: CustomResource) -> None:
    """Secrets, claims, jobs and services are named without one, so a job cannot point to those of others.

    A Gateway decides itself, by `allowedRoutes`, which namespaces may use it.
    """
    schema = custom_resource_definition(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
        "spec"
    ]
    fields = {path for path, _ in values(schema) if path[-2:-1] == ("properties",)}
    assert fields
    named = {path[-4:] for path in fields if "namespace" in path[-1].lower()}
    assert named == {("parentRefs", "items", "properties", "namespace")}


def change_in(namespace: str) -> PhaseChange:
    return PhaseChange("FinetuneJob", namespace, "sql", "u", "7", "Training", "Failed", "lost", 3, 9, "")


def test_a_team_is_notified_of_its_own_namespaces_alone() -> None:
    target = Target(name="hook", url_file="/etc/hook", namespaces=["team-a"])  # type: ignore[arg-type]
    assert target.wants(change_in("team-a"))
    assert not target.wants(change_in("team-b"))


def test_costs_by_namespace_cannot_be_charged_to_others_by_a_label() -> None:
    """A label is the user's own word. `spotune fleet --by namespace` does not read it."""
    status = {"gpuSeconds": {"spot": 3600.0}}
    labels = {"spotune.dev/team": "team-b"}
    job = {"metadata": {"name": "sql", "namespace": "team-a", "labels": labels}, "status": status}
    assert [usage.team for usage in fleet_of([job]).teams] == ["team-b"]
    assert [usage.team for usage in fleet_of([job], by="namespace").teams] == ["team-a"]
