"""Jobs in a queue of a real Kueue: admitted, given a part of their workers, preempted with a commit, admitted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster import kueue_install as kueue
from tests.cluster.finetune_jobs import ENDLESS, WORKERS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

HEAD = 1
URGENT = "urgent"
_SECONDS = 300


@pytest.fixture(scope="module")
def queue(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[Callable[[int], None]]:
    """A LocalQueue in the workplace; call it to set its quota of pods."""

    def set_quota(pods: int) -> None:
        workplace.kubectl.apply(kueue.cluster_queue(kueue.QUEUE, pods))

    with kueue.installed(cluster):
        set_quota(HEAD + WORKERS)
        workplace.kubectl.apply(kueue.flavor(), kueue.local_queue(kueue.QUEUE, kueue.QUEUE))
        workplace.kubectl.apply(kueue.priority_class(URGENT, 1000), kueue.priority_class("low", 10))
        yield set_quota


@contextmanager
def urgent_job(workplace: Workplace) -> Iterator[None]:
    """A Job of a pod in the same queue, with a higher priority."""
    labels = {"kueue.x-k8s.io/queue-name": kueue.QUEUE, "kueue.x-k8s.io/priority-class": URGENT}
    container = {
        "name": "main",
        "image": "testcluster.local/pause:1",
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"restartPolicy": "Never", "containers": [container], "securityContext": security}
    workplace.kubectl.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": URGENT, "labels": labels},
            "spec": {"suspend": True, "template": {"spec": pod}},
        }
    )
    try:
        wait_for("the start of the urgent job", _SECONDS, lambda: _starts(workplace), every=0.5)
        yield
    finally:
        workplace.kubectl("delete", "job", URGENT, "--cascade=foreground")


def _starts(workplace: Workplace) -> bool:
    return not workplace.kubectl.get("job", URGENT)["spec"]["suspend"]


def manifest(workplace: Workplace, name: str, minimum: int) -> dict[str, Any]:
    """A job in the queue."""
    found = workplace.manifest(name, training={"maxSteps": ENDLESS}, workers={"min": minimum, "resizeCooldown": "5s"})
    found["spec"]["cluster"] |= {"queueName": kueue.QUEUE, "queuePriorityClass": "low"}
    return found


def wait_for_workers(job: RunningJob, number: int) -> dict[str, Any]:
    """Wait until a worker group of this size makes steps."""
    return job.wait_for_progress(
        f"training with {number} workers",
        lambda found: found.get("phase") == "Training" and found["workers"]["running"] == number,
        _SECONDS,
    )


def test_preempted_job_commits_and_is_admitted_again(
    queue: Callable[[int], None],
    workplace: Workplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    queue(HEAD + WORKERS)
    with workplace.running(manifest(workplace, "preempted", WORKERS)) as job:
        job.wait_for_step(10)
        with urgent_job(workplace):
            wait_for("the end of the job's pods", _SECONDS, lambda: not job.pods("head") and not job.pods("workers"))
            assert not any(
                kueue.admitted(job.kubectl)[name] for name in kueue.admitted(job.kubectl) if "raycluster" in name
            )
        job.wait_for_step(job.progress()["step"] + 10, generation=2)
        job.finish_soon()
        ended = job.wait_until_complete()
        artifacts = job.artifacts(tmp_path)

    expected = undisturbed(len(artifacts.steps()))
    assert ended.status["stepsLost"] == 0
    assert artifacts.samples() == expected.samples()
    assert artifacts.sha256() == expected.sha256()


def test_job_takes_the_part_that_the_queue_has(
    queue: Callable[[int], None], workplace: Workplace, tmp_path: Path
) -> None:
    queue(HEAD + 1)
    with workplace.running(manifest(workplace, "partial", 1)) as job:
        wait_for_workers(job, 1)
        seen = job.wait_for(
            "its request", lambda seen: "no quota for 1 more" in seen.condition("ClusterReady").get("message", "")
        )
        assert seen.status["queue"]["workers"] == WORKERS
        queue(HEAD + WORKERS)
        wait_for_workers(job, WORKERS)
        with urgent_job(workplace):  # takes the place of a worker
            wait_for_workers(job, 1)
        wait_for_workers(job, WORKERS)
        job.finish_soon()
        ended = job.wait_until_complete()
        artifacts = job.artifacts(tmp_path)
    assert ended.status["stepsLost"] == 0
    assert [line["step"] for line in artifacts.steps()] == list(range(1, len(artifacts.steps()) + 1))
