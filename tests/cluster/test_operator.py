"""`kubectl apply` of a FinetuneJob leads to a model; meanwhile the cluster's objects match the job."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.errors import DidNotStartError
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.waiting import wait_for
from tests.cluster import prometheus, text_to_sql
from tests.cluster.faults.status_invariants import SECONDS_OLD, invariant_violations
from tests.cluster.faults.timeline import training_intervals
from tests.cluster.finetune_jobs import NOWHERE, RunningJob, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

TRAINING_ROWS = int(os.environ.get("SPOTUNE_TEST_EXAMPLE_ROWS", "3200"))
"""Training rows of the text-to-SQL example. All 80000 take some minutes and reach the accuracy of `make demo`."""
ALL_ROWS = 80_000
STEPS = TRAINING_ROWS // 64
CHILDREN = ("persistentvolumeclaim", "configmap", "networkpolicy", "raycluster")


def _table(kubectl: Kubectl, name: str) -> dict[str, str]:
    """The row of a job in `kubectl get ftj`, by column heading."""
    heading, row = kubectl("get", "ftj", name).splitlines()
    starts = [found.start() for found in re.finditer(r"\S+", heading)]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    return {heading[start:end].strip(): row[start:end].strip() for start, end in bounds}


def _of_job(kubectl: Kubectl, name: str) -> set[str]:
    """All objects of a job in the namespace, as kind/name."""
    kinds = "pods,services,configmaps,networkpolicies,rayclusters,persistentvolumeclaims"
    found = kubectl("get", kinds, f"--selector=spotune.dev/job={name}", "--output=name").split()
    rays = kubectl("get", "services,secrets", f"--selector=ray.io/cluster=spotune-{name}", "--output=name").split()
    return {*found, *rays}


def test_text_to_sql_example_is_trained_by_kubectl_apply(
    operator: Operator, workplace: Workplace, tmp_path: Path
) -> None:
    corpus = text_to_sql.write_corpus(tmp_path, TRAINING_ROWS)
    manifest = text_to_sql.manifest(workplace, every_steps=STEPS // 4, samples=0 if TRAINING_ROWS == ALL_ROWS else 16)
    with workplace.running(manifest) as job:
        waiting = job.wait_for("the missing data to be named", lambda seen: seen.holds("Stalled"), 180)
        assert waiting.condition("Stalled")["reason"] == "PreflightFailed"
        assert "data" in waiting.condition("PreflightPassed")["message"]
        assert not job.pods("workers"), "no GPU is paid for before there is something to train on"
        job.move_to_own_volume(corpus, text_to_sql.ON_VOLUME)
        tables = _tables_until_complete(job)
        artifacts = job.artifacts(tmp_path)
        wait_for("the cluster to be given back", 120, lambda: _of_job(job.kubectl, job.name) == _left(job), every=0.5)

    assert tables[-1]["LOSS"]
    for seen in job.history.seen:
        if eta := seen.status.get("eta"):
            assert datetime.fromisoformat(eta).timestamp() >= seen.time - SECONDS_OLD
    last = [tables[-1][column] for column in ("PHASE", "STEP", "CHECKPOINT", "RESTARTS")]
    assert last == ["Complete", str(STEPS), str(STEPS), "0"]
    assert invariant_violations(job.history.seen, training_intervals(artifacts)) == []
    status = job.history.last.status
    assert status["output"] == f"pvc://spotune-{job.name}/{job.directory.removeprefix('/data/')}/export"
    assert status["evalLoss"] == pytest.approx(artifacts.ledger.records("evaluated")[-1]["loss"], rel=1e-4)
    result = json.loads(artifacts.directory.result.read_text())
    assert result["exportSha256"] == artifacts.sha256()
    assert result["executionAccuracy"] >= (0.85 if TRAINING_ROWS == ALL_ROWS else 0)


def _tables_until_complete(job: RunningJob) -> list[dict[str, str]]:
    tables: list[dict[str, str]] = []

    def complete() -> bool:
        tables.append(_table(job.kubectl, job.name))
        assert tables[-1]["PHASE"] != "Failed", job.history.last.condition("Failed")
        return tables[-1]["PHASE"] == "Complete"

    wait_for(f"{job.name}: Complete", 600, complete, every=1.0)
    return tables


def _left(job: RunningJob) -> set[str]:
    """Objects of a trained job that are kept until it is deleted: its volume, and objects without cost."""
    name = f"spotune-{job.name}"
    return {f"persistentvolumeclaim/{name}", f"configmap/{name}", f"networkpolicy.networking.k8s.io/{name}"}


@pytest.fixture
def nowhere(operator: Operator, workplace: Workplace) -> Iterator[Callable[..., RunningJob]]:
    """Starts jobs with their own volume, whose pods fit no node."""
    with ExitStack() as started:

        def start(name: str, **sections: dict[str, Any]) -> RunningJob:
            storage_class = workplace.cluster.storage_class
            own = {"existingClaim": "", "storageClassName": storage_class, "size": "300Mi", "retain": False}
            storage = {**own, **sections.pop("storage", {})}
            manifest = workplace.manifest(name, storage=storage, head=NOWHERE, **sections)
            return started.enter_context(workplace.running(manifest))

        yield start


@pytest.mark.parametrize("retain", [True, False], ids=["retained", "not-retained"])
def test_deletion_leaves_nothing_but_a_retained_volume(retain: bool, nowhere: Callable[..., RunningJob]) -> None:
    name = f"deleted-{'kept' if retain else 'gone'}"
    job = nowhere(name, storage={"retain": retain})
    wait_for("its children", 60, lambda: _has_children(job), every=0.3)
    wait_for("its head pod", 60, lambda: job.pods("head"), every=0.3)
    job.kubectl("delete", "ftj", name)
    left = {f"persistentvolumeclaim/spotune-{name}"} if retain else set()
    wait_for("the garbage collector", 120, lambda: _of_job(job.kubectl, name) == left, every=0.5)
    job.kubectl("delete", "pvc", f"spotune-{name}", "--ignore-not-found")


def _has_children(job: RunningJob) -> bool:
    return all(job.kubectl("get", kind, f"spotune-{job.name}", "--ignore-not-found") for kind in CHILDREN)


def _uid(job: RunningJob, kind: str) -> str:
    """The uid of a child of a job; empty if there is none."""
    return job.kubectl("get", kind, f"spotune-{job.name}", "--ignore-not-found", "--output=jsonpath={.metadata.uid}")


@pytest.mark.parametrize("kind", CHILDREN)
def test_deleted_child_is_made_again(kind: str, nowhere: Callable[..., RunningJob]) -> None:
    job = nowhere(f"without-{kind}")
    name = f"spotune-{job.name}"
    wait_for("its children", 60, lambda: _has_children(job), every=0.3)
    before = job.kubectl.get(kind, name)["metadata"]["uid"]
    job.kubectl("delete", kind, name, "--wait=false")

    try:
        wait_for(f"another {kind}", 180, lambda: _uid(job, kind) not in ("", before), every=0.3)
    except DidNotStartError as error:
        error.add_note(job.kubectl("describe", f"{kind},pods"))
        raise


@pytest.fixture
def _prometheus(operator: Operator) -> Iterator[None]:
    """The kind `PodMonitor`, and an operator with a setting to use it."""
    with (
        prometheus.known(operator.cluster.kubectl, "PodMonitor"),
        operator.with_values("monitoring.namespace=monitoring"),
    ):
        yield


@pytest.mark.usefixtures("_prometheus")
def test_prometheus_is_told_where_to_look(nowhere: Callable[..., RunningJob]) -> None:
    job = nowhere("monitored")
    name = f"spotune-{job.name}"

    first = wait_for("a PodMonitor", 60, lambda: _uid(job, "podmonitor"), every=0.3)
    found = job.kubectl.get("podmonitor", name)
    assert found["spec"]["selector"]["matchLabels"]["spotune.dev/job"] == job.name
    job.kubectl("delete", "podmonitor", name)
    wait_for("another PodMonitor", 60, lambda: _uid(job, "podmonitor") not in ("", first), every=0.3)


DRIFT = {
    "persistentvolumeclaim": ("/metadata/labels/spotune.dev~1job", "somebody-elses"),
    "configmap": ("/data/job.yaml", "spec: {}"),
    "networkpolicy": ("/spec/ingress", [{}]),
    "raycluster": ("/spec/headGroupSpec/rayStartParams/num-cpus", "8"),
}
"""A field of each child that the operator owns, and the value to which the test changes it."""


@pytest.mark.parametrize("kind", CHILDREN)
def test_changed_child_is_put_right_and_what_others_own_is_left_alone(
    kind: str, nowhere: Callable[..., RunningJob]
) -> None:
    job = nowhere(f"drifted-{kind}")
    name = f"spotune-{job.name}"
    wait_for("its children", 60, lambda: _has_children(job), every=0.3)
    path, value = DRIFT[kind]
    before = _at(job.kubectl.get(kind, name), path)
    assert before != value
    patch = json.dumps([{"op": "replace", "path": path, "value": value}])
    job.kubectl("patch", kind, name, "--type=json", f"--patch={patch}")
    job.kubectl("annotate", kind, name, "example.com/owner=somebody", "--overwrite")
    wait_for(f"{path} as it was", 60, lambda: _at(job.kubectl.get(kind, name), path) == before, every=0.3)
    assert job.kubectl.get(kind, name)["metadata"]["annotations"]["example.com/owner"] == "somebody"


def _at(found: Any, path: str) -> Any:
    """The value at a JSON pointer."""
    for part in path.removeprefix("/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


BROKEN: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "storage class": ({"storage": {"storageClassName": "nowhere"}}, "nowhere does not exist in this cluster"),
    "home folder": ({"model": {"source": "~/models/t5"}}, "~/models/t5 is in a home folder"),
    "pod template": (
        {"workers": {"count": 2, "gpus": 0, "podTemplate": {"spec": {"containers": [{"name": "sidecar"}]}}}},
        "spec.workers.podTemplate",
    ),
    "GPUs among the resources": (
        {"workers": {"count": 2, "gpus": 0, "resources": {"limits": {"nvidia.com/gpu": "1"}}}},
        "give GPUs per pod as workers.gpus",
    ),
}
"""Specs that the API server accepts but the operator cannot run, and words of its message."""


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.replace(" ", "-"))
def test_job_that_cannot_be_is_stalled_with_a_sentence_until_it_is_mended(
    case: str, nowhere: Callable[..., RunningJob]
) -> None:
    sections, words = BROKEN[case]
    job = nowhere(f"broken-{case.lower().replace(' ', '-')}", **{name: dict(part) for name, part in sections.items()})
    stalled = job.wait_for("Stalled", lambda seen: seen.holds("Stalled"), 60)
    assert words in stalled.condition("Stalled")["message"]
    assert stalled.status["phase"] == "Stalled"
    assert not stalled.holds("Ready")
    sound = job.workplace.manifest(job.name, head=NOWHERE)["spec"]
    job.kubectl("patch", "ftj", job.name, "--type=json", f"--patch={_replace_spec(sound)}")
    job.wait_for("not Stalled any more", lambda seen: "phase" in seen.status and not seen.holds("Stalled"), 60)


def _replace_spec(spec: dict[str, Any]) -> str:
    return json.dumps([{"op": "replace", "path": "/spec", "value": spec}])
