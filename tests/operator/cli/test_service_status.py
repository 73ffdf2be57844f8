"""The output of `spotune status` for services with the operator's status."""

import re
from typing import Any

import pytest

from spotune_operator.cli.events import summarize_service_events
from spotune_operator.cli.service_status import listing, notable_service_conditions, service_panel, tables
from tests.operator.cli.test_events import event
from tests.operator.cli.test_status import rendered
from tests.operator.support.model_services import (
    CLUSTER,
    NOW,
    SERVICE_UID,
    ago,
    condition,
    model_service,
    service_pod,
    serving,
)
from tests.operator.support.objects import training_job

STALLED = condition("Stalled", "True", "DeployFailed", "out of memory")


def shown(service: dict[str, Any], *pods: dict[str, Any], events: Any = ()) -> list[list[str]]:
    """The cells of each line of the panel."""
    return [re.split(" {2,}", line) for line in rendered(service_panel(service, pods, events, NOW))]


def listed(*services: dict[str, Any], jobs: Any = (), with_namespace: bool = False) -> list[str]:
    return rendered(tables(jobs, services, NOW, with_namespace=with_namespace, with_bar=False))


def test_services_have_a_table_of_their_own_below_the_jobs() -> None:
    lines = listed(serving(requestsPerSecond=1.25), model_service(name="new"), jobs=[training_job()])
    assert [re.split(" {2,}", line) for line in lines[2:]] == [
        [""],
        ["NAME", "PHASE", "REPLICAS", "MODEL", "REQUESTS/S", "AGE", "URL"],
        [
            *("answers", "Serving", "2/2", "job-01234567-step-9", "1.2", "1 h 00 min"),
            "http://spotunems-answers.team.svc",
        ],
        ["new", "New", "-", "-", "-", "1 h 00 min", "-"],
    ]


def test_a_table_without_rows_is_left_out() -> None:
    assert listed(serving())[0].startswith("NAME     PHASE    REPLICAS")
    assert not any("REPLICAS" in line for line in listed(jobs=[training_job()]))


def test_services_of_all_namespaces_are_named_with_theirs_and_problems_follow() -> None:
    lines = listed(model_service(STALLED, phase="Stalled"), with_namespace=True)
    assert lines[1].startswith("team       answers")
    assert lines[2] == "answers: Stalled: DeployFailed: out of memory"


def test_panel_shows_models_replicas_load_and_url() -> None:
    service = serving(
        pendingModel={"location": "pvc://spotune-job/export", "version": "job-01234567-step-18"},
        rollout={"version": "job-01234567-step-18", "weight": 10},
        adapters={"sql": {"location": "pvc://lora/export", "version": "lora-1"}},
        requestsPerSecond=12.3,
        firstTokenMillisecondsP50=85.4,
        unknownField={"of": "a later version"},
    )
    service["spec"]["replicas"] = {"min": 1, "max": 4}
    rows = {label: content for label, content, *_ in shown(service)}
    assert rows == {
        "answers": "Serving",
        "model": "job-01234567-step-9 from pvc://spotune-job/export",
        "next model": "job-01234567-step-18 from pvc://spotune-job/export",
        "rollout": "10 % of the requests go to job-01234567-step-18",
        "adapter sql": "lora-1 from pvc://lora/export",
        "replicas": "2/2 ready (autoscaling from 1 to 4)",
        "load": "12.3 requests/s, first token after 85 ms (median)",
        "URL": "http://spotunems-answers.team.svc",
        "age": "1 h 00 min",
    }


def test_panel_of_a_new_service_has_no_empty_rows() -> None:
    service = model_service()
    del service["status"]
    assert shown(service) == [["answers", "New"], ["age", "1 h 00 min"]]


def test_pods_are_listed_with_node_capacity_and_problem() -> None:
    unschedulable = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]
    waiting = service_pod(suffix="bbbbb", phase="Pending", containerStatuses=[], conditions=unschedulable)
    waiting["spec"] = {}
    restarted = service_pod()
    restarted["status"]["containerStatuses"][0]["restartCount"] = 2
    going = service_pod("head")
    going["metadata"]["deletionTimestamp"] = ago(1)
    table = shown(serving(), going, waiting, restarted, service_pod("gateway", "gateway"))
    assert table[table.index([""]) + 1 :] == [
        ["COMPONENT", "POD", "NODE", "STATE"],
        ["gateway", f"{CLUSTER}-gateway-worker-aaaaa", "n1 (on-demand)", "ready"],
        ["replicas", f"{CLUSTER}-spot-worker-aaaaa", "n1 (spot)", "ready, 2 restarts"],
        ["replicas", f"{CLUSTER}-spot-worker-bbbbb", "- (spot)", "Unschedulable: no GPU"],
        ["head", f"{CLUSTER}-head-aaaaa", "n1 (on-demand)", "stopping"],
    ]


def test_with_two_ray_clusters_the_pods_of_the_newer_one_are_marked() -> None:
    old, new = service_pod("head", suffix="zzzzz"), service_pod("head", suffix="aaaaa")
    worker = service_pod("gateway", "gateway")
    for pod, cluster, created in ((old, "first", 60), (worker, "first", 10), (new, "second", 30)):
        pod["metadata"]["labels"]["ray.io/cluster"] = cluster
        pod["metadata"]["creationTimestamp"] = ago(created)
    table = shown(serving(), old, worker, new)
    assert table[table.index([""]) + 1 :] == [
        ["COMPONENT", "CLUSTER", "POD", "NODE", "STATE"],
        ["gateway", "old", f"{CLUSTER}-gateway-worker-aaaaa", "n1 (on-demand)", "ready"],
        ["head", "new", f"{CLUSTER}-head-aaaaa", "n1 (on-demand)", "ready"],
        ["head", "old", f"{CLUSTER}-head-zzzzz", "n1 (on-demand)", "ready"],
    ]


def test_only_the_latest_events_are_shown() -> None:
    happened = [event("RayService", "spotunems-answers", message=f"no {number}") for number in range(7)]
    events = summarize_service_events(happened, serving(), [])
    lines = [" ".join(cells) for cells in shown(serving(), events=events)]
    assert [line[-4:] for line in lines if "RayService" in line] == ["no 2", "no 3", "no 4", "no 5", "no 6"]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ([("Ready", "True"), ("Reconciling", "False"), ("Stalled", "False"), ("ReplicasReady", "True")], []),
        ([("Ready", "True"), ("Reconciling", "True")], ["Reconciling"]),
        ([("Ready", "False"), ("ReplicasReady", "True")], ["Ready"]),
        ([("Suspended", "True"), ("ReplicasReady", "False"), ("Ready", "False")], ["Suspended"]),
        ([("ModelAvailable", "False"), ("ReplicasReady", "False")], ["ModelAvailable", "ReplicasReady"]),
        ([("RolledOut", "False")], ["RolledOut"]),
    ],
)
def test_only_notable_conditions_of_services_are_shown(conditions: list[tuple[str, str]], names: list[str]) -> None:
    service = model_service(*(condition(*found, message=found[0]) for found in conditions))
    assert [found["type"] for found in notable_service_conditions(service)] == names


def test_a_cause_is_shown_once() -> None:
    message = "1 of 2 replicas are ready"
    service = model_service(
        condition("Ready", "False", "WaitingForReplicas", "see condition ReplicasReady"),
        condition("Reconciling", "True", "WaitingForReplicas", message),
        condition("ReplicasReady", "False", "WaitingForReplicas", message),
    )
    assert shown(service)[-1] == ["not ReplicasReady", f"WaitingForReplicas: {message} (1 min 00 s)"]
    assert len(notable_service_conditions(service)) == 1


@pytest.mark.parametrize(
    ("kind", "name", "belongs"),
    [
        ("RayService", "spotunems-answers", True),
        ("RayCluster", CLUSTER, True),
        ("Pod", f"{CLUSTER}-spot-worker-zzzzz", True),
        ("Pod", f"{CLUSTER}-gateway-worker-zzzzz", True),
        ("Pod", f"{CLUSTER}-head-zzzzz", True),
        ("Pod", "spotunems-answers-other-head-zzzzz", False),
        ("RayService", "spotunems-answers-2", False),
        ("RayCluster", "spotune-answers", False),
    ],
)
def test_children_and_lost_pods_belong_to_the_service(kind: str, name: str, belongs: bool) -> None:
    assert bool(summarize_service_events([event(kind, name)], serving(), [service_pod("head")])) is belongs


def test_events_of_a_job_of_the_same_name_are_left_out() -> None:
    involved = {"name": "answers", "uid": SERVICE_UID}
    own = event(involvedObject={"kind": "ModelService", **involved})
    of_job = event(involvedObject={"kind": "FinetuneJob", "name": "answers", "uid": "another"})
    assert [found.object for found in summarize_service_events([own, of_job], serving(), [])] == [
        "ModelService answers"
    ]


def test_json_has_name_namespace_and_status() -> None:
    assert listing([serving()]) == [{"name": "answers", "namespace": "team", "status": serving()["status"]}]
