"""Why pods do not start, out of what a real cluster said (pending.yaml), and of what it seldom says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune_operator.observe.pod_problems import Trouble, explain_pending

STATUSES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "pending.yaml").read_text())
TAINTED = "1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/2 nodes are available: "
TAINTED += "2 Preemption is not helpful for scheduling."
NO_REGISTRY = "image testcluster.local/trainer:none cannot be pulled: failed to pull and unpack image "
NO_COMMAND = 'exec: "/nope": stat /nope: no such file or directory: unknown'


def explain(status: dict[str, Any], **raw: Any) -> Trouble | None:
    return explain_pending({"metadata": {"name": "a", "namespace": "team"}, "status": status} | raw)


def waiting(reason: str, name: str = "ray-worker", **last: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "the kubelet's words"}}
    return {"name": name, "image": "trainer:1", "state": state, "lastState": last}


@pytest.mark.parametrize(
    ("name", "reason", "begin", "end"),
    [
        ("crash", "CrashLoopBackOff", "container ray-worker: ends again and again, last with exit code 3", ""),
        ("gated", "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates", ""),
        (
            "gpu-on-n2",
            "UnexpectedAdmissionError",
            "the node refused or ended it: Pod was rejected: Allocate failed",
            "",
        ),
        ("gpus", "Unschedulable", f"0/2 nodes are available: 1 Insufficient nvidia.com/gpu, {TAINTED}", ""),
        ("init-crash", "CrashLoopBackOff", "container first: ends again and again, last with exit code 4", ""),
        ("invalid-image", "InvalidImageName", "container ray-worker: ", "(library/Not An Image!) must be lowercase"),
        ("memory", "Unschedulable", f"0/2 nodes are available: 1 Insufficient memory, {TAINTED}", ""),
        ("never-pull", "ErrImageNeverPull", "container ray-worker: ", "is not present with pull policy of Never"),
        ("no-claim", "Unschedulable", "", 'persistentvolumeclaim "nope" not found. not found'),
        ("no-command", "RunContainerError", "container ray-worker: cannot be started: failed", NO_COMMAND),
        ("no-key", "CreateContainerConfigError", "", "couldn't find key token in Secret t/some"),
        (
            "no-secret",
            "CreateContainerConfigError",
            'container ray-worker: secret "hf" not found in namespace team: create it',
            "",
        ),
        ("no-secret-envfrom", "CreateContainerConfigError", 'container ray-worker: secret "bucket" not found', ""),
        ("nowhere", "Unschedulable", "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity", ""),
        ("root", "CreateContainerConfigError", "container ray-worker: container has runAsNonRoot", ""),
        ("unbound-claim", "Unschedulable", "", "pod has unbound immediate PersistentVolumeClaims. not found"),
        ("wrong-registry", "ErrImagePull", "container ray-worker: image registry.example/", "server misbehaving"),
        ("wrong-tag", "ErrImagePull", f"container ray-worker: {NO_REGISTRY}", "failure in name resolution"),
        ("cluster-quota", "QuotaExceeded", "worker pods cannot be made: exceeded quota: team, requested: ", "=128Mi"),
        ("cluster-nohead", "QuotaExceeded", "the head pod cannot be made: exceeded quota: team, ", "limited: pods=0"),
        ("cluster-limits", "FailedCreateHeadPod", "the head pod cannot be made: spec.containers[0]", "limit of 32Mi"),
        ("cluster-restricted", "FailedCreateHeadPod", "the head pod cannot be made: violates PodSecurity", ""),
    ],
)
def test_the_words_of_a_real_cluster_are_shown(name: str, reason: str, begin: str, end: str) -> None:
    trouble = explain(STATUSES[name])
    assert trouble is not None
    assert trouble.reason == reason
    assert trouble.message.startswith(begin)
    assert trouble.message.endswith(end)


@pytest.mark.parametrize("name", ["no-command", "wrong-tag"])
def test_a_trouble_is_the_same_during_a_try_and_in_the_pause_after_it(name: str) -> None:
    assert explain(STATUSES[name]) == explain(STATUSES[f"{name}-at-first"])


@pytest.mark.parametrize("name", STATUSES)
def test_what_is_said_fits_into_a_condition(name: str) -> None:
    trouble = explain(STATUSES[name])
    if trouble is not None:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", trouble.reason)
        assert "\n" not in trouble.message


def test_a_pause_between_two_tries_changes_nothing() -> None:
    status = STATUSES["crash"]
    later = yaml.safe_load(yaml.safe_dump(status).replace("back-off 40s", "back-off 5m0s"))
    assert later != status
    assert explain(later) == explain(status)


def test_a_name_that_a_pod_never_had_is_not_shown() -> None:
    status = STATUSES["cluster-quota"]
    next_try = yaml.safe_load(yaml.safe_dump(status).replace("a-workers-worker-s8tlk", "a-workers-worker-x2p4q"))
    assert next_try != status
    assert explain(next_try) == explain(status)


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]},
        STATUSES["starting"],
        STATUSES["no-configmap-volume"],  # only Events have it
        {"phase": "Running", "containerStatuses": [{"name": "a", "state": {"running": {}}}]},
        {"conditions": [{"type": "ReplicaFailure", "status": "False", "reason": "x"}]},
    ],
    ids=["nothing-yet", "scheduled", "starting", "volume", "runs", "cluster"],
)
def test_what_only_takes_its_time_is_no_trouble(status: dict[str, Any]) -> None:
    assert explain(status) is None


def test_too_little_memory_is_said_with_what_to_raise() -> None:
    status = {"containerStatuses": [waiting("CrashLoopBackOff", terminated={"reason": "OOMKilled", "exitCode": 137})]}
    trouble = explain(status)
    assert trouble is not None
    assert trouble.message.endswith("raise resources.limits.memory")


def test_last_words_of_a_container_are_shown() -> None:
    last = {"reason": "Error", "exitCode": 1, "message": "no such model\n"}
    trouble = explain({"containerStatuses": [waiting("CrashLoopBackOff", terminated=last)]})
    assert trouble is not None
    assert trouble.message.endswith("exit code 1: no such model")


def test_of_several_containers_the_one_that_says_what_to_change_is_heard() -> None:
    containers = [waiting("CrashLoopBackOff"), waiting("CreateContainerConfigError"), waiting("ImagePullBackOff", "b")]
    reasons = []
    while containers:
        trouble = explain({"containerStatuses": containers})
        reasons.append(trouble.reason if trouble else "")
        containers.pop()
    assert reasons == ["ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"]


def test_a_gate_is_shown_by_its_name() -> None:
    spec = {"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]}
    trouble = explain(STATUSES["gated"], spec=spec)
    assert trouble is not None
    assert trouble.message.endswith("gates: kueue.x-k8s.io/elastic-job")
