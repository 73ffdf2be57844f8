"""Problems of pods, from statuses of a real cluster (pending.yaml) and constructed ones."""

import re
from typing import Any

import pytest
import yaml

from spotune.custom_resource.pod_problems import PodProblem, pod_problem
from spotune_operator.reconcile.kstatus import NEED_A_USER
from tests import ROOT

STATUSES: dict[str, Any] = yaml.safe_load((ROOT / "tests/operator/support/pending.yaml").read_text())
TAINTED = "1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/2 nodes are available: "
TAINTED += "2 Preemption is not helpful for scheduling."
NO_HEAD = "the head pod cannot be created: "
NO_REGISTRY = "image testcluster.local/trainer:none cannot be pulled: failed to pull and unpack image "
NO_COMMAND = 'exec: "/nope": stat /nope: no such file or directory: unknown'


def explain(status: dict[str, Any], **raw: Any) -> PodProblem | None:
    return pod_problem({"metadata": {"name": "a", "namespace": "team"}, "status": status} | raw)


def waiting(
    reason: str, name: str = "ray-worker", *, message: str = "the kubelet's text", **last: Any
) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": name, "image": "trainer:1", "state": state, "lastState": last}


@pytest.mark.parametrize(
    ("name", "reason", "begin", "end"),
    [
        ("crash", "CrashLoopBackOff", "container ray-worker: crashes repeatedly, last with exit code 3", ""),
        ("gated", "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates", ""),
        (
            "gpu-on-n2",
            "UnexpectedAdmissionError",
            "the node rejected or evicted the pod: Pod was rejected: Allocate failed",
            "",
        ),
        ("gpus", "Unschedulable", f"0/2 nodes are available: 1 Insufficient nvidia.com/gpu, {TAINTED}", ""),
        ("init-crash", "CrashLoopBackOff", "container first: crashes repeatedly, last with exit code 4", ""),
        ("invalid-image", "InvalidImageName", "container ray-worker: ", "(library/Not An Image!) must be lowercase"),
        ("memory", "Unschedulable", f"0/2 nodes are available: 1 Insufficient memory, {TAINTED}", ""),
        ("never-pull", "ErrImageNeverPull", "container ray-worker: ", "is not present with pull policy of Never"),
        ("no-claim", "Unschedulable", "", 'persistentvolumeclaim "nope" not found. not found'),
        ("no-command", "RunContainerError", "container ray-worker: cannot start: failed", NO_COMMAND),
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
        (
            "cluster-quota",
            "QuotaExceeded",
            "worker pods cannot be created: exceeded quota: team, requested: ",
            "=128Mi",
        ),
        (
            "cluster-nohead",
            "QuotaExceeded",
            f"{NO_HEAD}exceeded quota: team, ",
            "limited: pods=0",
        ),
        (
            "cluster-limits",
            "FailedCreateHeadPod",
            f"{NO_HEAD}spec.containers[0]",
            "limit of 32Mi",
        ),
        ("cluster-restricted", "FailedCreateHeadPod", f"{NO_HEAD}violates PodSecurity", ""),
    ],
)
def test_messages_of_a_real_cluster_are_shown(name: str, reason: str, begin: str, end: str) -> None:
    problem = explain(STATUSES[name])
    assert problem is not None
    assert problem.reason == reason
    assert problem.message.startswith(begin)
    assert problem.message.endswith(end)


@pytest.mark.parametrize("name", ["no-command", "wrong-tag"])
def test_problem_is_the_same_during_and_between_attempts(name: str) -> None:
    assert explain(STATUSES[name]) == explain(STATUSES[f"{name}-at-first"])


@pytest.mark.parametrize("name", STATUSES)
def test_problem_fits_into_a_condition(name: str) -> None:
    problem = explain(STATUSES[name])
    if problem is not None:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", problem.reason)
        assert "\n" not in problem.message


@pytest.mark.parametrize("kind", ["secret", "configmap"])
def test_a_kubelet_without_answer_of_the_api_server_needs_no_user(kind: str) -> None:
    """Seen when a node came back while the API server was busy."""
    message = f"failed to sync {kind} cache: timed out waiting for the condition"
    problem = explain({"containerStatuses": [waiting("CreateContainerConfigError", message=message)]})
    assert problem is not None
    assert problem.reason not in NEED_A_USER
    assert problem.message.startswith("container ray-worker: the node waits for its Secrets and ConfigMaps")


def test_wait_between_attempts_changes_nothing() -> None:
    status = STATUSES["crash"]
    later = yaml.safe_load(yaml.safe_dump(status).replace("back-off 40s", "back-off 5m0s"))
    assert later != status
    assert explain(later) == explain(status)


def test_name_of_a_pod_that_was_never_created_is_removed() -> None:
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
def test_normal_startup_is_no_problem(status: dict[str, Any]) -> None:
    assert explain(status) is None


def test_memory_limit_is_named_for_an_oom_kill() -> None:
    status = {"containerStatuses": [waiting("CrashLoopBackOff", terminated={"reason": "OOMKilled", "exitCode": 137})]}
    problem = explain(status)
    assert problem is not None
    assert problem.message.endswith("raise resources.limits.memory")


def test_termination_message_of_a_container_is_shown() -> None:
    last = {"reason": "Error", "exitCode": 1, "message": "no such model\n"}
    problem = explain({"containerStatuses": [waiting("CrashLoopBackOff", terminated=last)]})
    assert problem is not None
    assert problem.message.endswith("exit code 1: no such model")


def test_most_actionable_problem_of_several_containers_wins() -> None:
    containers = [waiting("CrashLoopBackOff"), waiting("CreateContainerConfigError"), waiting("ImagePullBackOff", "b")]
    reasons = []
    while containers:
        problem = explain({"containerStatuses": containers})
        reasons.append(problem.reason if problem else "")
        containers.pop()
    assert reasons == ["ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"]


def test_what_an_unschedulable_pod_asks_for_comes_first() -> None:
    requests = {"cpu": "3500m", "memory": "16Gi", "nvidia.com/gpu": "1"}
    spec = {"containers": [{"name": "ray-worker", "resources": {"requests": requests}}]}
    problem = explain(STATUSES["gpus"], spec=spec)
    assert problem is not None
    begin = "the pod asks for 1 GPU, 3.5 CPU and 16 GiB; 0/2 nodes are available: 1 Insufficient nvidia.com/gpu, "
    assert problem.message.startswith(begin)
    gated = explain(STATUSES["gated"], spec=spec)
    assert gated is not None
    assert gated.message.startswith("Scheduling is blocked")


def test_scheduling_gate_is_named() -> None:
    spec = {"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]}
    problem = explain(STATUSES["gated"], spec=spec)
    assert problem is not None
    assert problem.message.endswith("gates: kueue.x-k8s.io/elastic-job")
