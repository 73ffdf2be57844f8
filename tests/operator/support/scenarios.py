"""Scenarios for the tests of decisions: a job, its observed state, and its status so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from spotune.custom_resource import Condition
from spotune.job import FinetuneJob, FinetuneJobStatus
from spotune_operator.children.config import JOB_FILE, config_map
from spotune_operator.kube.conditions import find
from spotune_operator.observe.state import Child, Observed, Pod
from spotune_operator.observe.supervisor_status import PollResult, parse_progress
from spotune_operator.reconcile.decide import Decision, decide
from spotune_operator.reconcile.desired_children import render
from spotune_operator.reconcile.pinned import resolve_as_pinned, template_hashes
from spotune_operator.settings import Settings
from tests.api.support.job_files import a_job

NOW = 1_800_000_000.0
SETTINGS = Settings(image="spotune/trainer:1")
CLASSES = {"shared": {"metadata": {"name": "shared", "annotations": {}}, "provisioner": "example.org/nfs"}}


def a_cluster_job(**sections: Any) -> FinetuneJob:
    """A small job for a cluster without a known cloud, with sections of its spec replaced."""
    given = {
        "cluster": {"provider": "none"},
        "storage": {"storageClassName": "shared", "size": "10Gi"},
        "training": {"epochs": 3, "globalBatchSize": 96},
        "dataset": {"train": {"source": "shards/train"}},
        "workers": {"count": 2, "min": 1},
    }
    return a_job(**(given | sections))


@dataclass
class Scenario:
    """A job with repeated decisions, while tests change its observed state."""

    job: FinetuneJob
    generation: int = 1
    status: FinetuneJobStatus = field(default_factory=FinetuneJobStatus)
    observed: Observed = field(default_factory=lambda: Observed(storage_classes=CLASSES))
    now: float = NOW
    settings: Settings = SETTINGS

    def decide(self, *, after: float = 0.0) -> Decision:
        """Advance the clock and decide; the new status is the input of the next decision."""
        self.now += after
        decision = decide(
            render(self.job, "uid-1", self.status.pinned, self.observed.provider_ids, self.settings),
            generation=self.generation,
            previous=self.status,
            observed=self.observed,
            now=self.now,
            settings=self.settings,
        )
        self.status = decision.status
        return decision

    def observe(self, **changes: Any) -> None:
        """Replace parts of the observed state."""
        self.observed = replace(self.observed, **changes)

    def edit(self, job: FinetuneJob) -> None:
        """Change the spec, as a user would."""
        self.job = job
        self.generation += 1

    def condition(self, name: str) -> Condition:
        """A condition of the current status."""
        found = find(self.status.conditions, name)
        assert found is not None, f"{name} of {[each.type for each in self.status.conditions]}"
        return found

    def is_true(self, name: str) -> bool:
        """Whether a condition is true."""
        return self.condition(name).status == "True"

    # The observed state

    def job_file(self) -> str:
        """The SHA-256 of the job file, which the supervisor reports."""
        resolved = resolve_as_pinned(self.job, self.status.pinned, (), self.settings, "uid-1")
        return sha256(config_map(resolved)["data"][JOB_FILE].encode()).hexdigest()

    def has_children(self, **cluster: Any) -> None:
        """Add a bound claim and a RayCluster."""
        name = f"spotune-{self.job.metadata.name}"
        namespace, job = self.job.metadata.namespace, self.job.metadata.name
        claim = Child("PersistentVolumeClaim", namespace, name, "uid-c", job, "1", phase="Bound", capacity="10Gi")
        ray = Child("RayCluster", namespace, name, "uid-r", job, "2", **cluster)
        self.observe(children={"PersistentVolumeClaim": claim, "RayCluster": ray})

    def has_pods(self, head: bool = True, workers: int = 0, pending: int = 0, **changes: Any) -> None:
        """Set the pods: a running head, running workers and pending workers, all of the current templates."""
        assert self.status.pinned is not None, "decide once first"
        hashes = template_hashes(self.status.pinned)
        namespace, job = self.job.metadata.namespace, self.job.metadata.name
        pods = []
        if head:
            given: dict[str, Any] = {"phase": "Running", "ready": True, "ip": "10.0.0.1", "node": "n1"}
            given |= {"created": self.now, "started": self.now}
            pods.append(Pod("head", namespace, "uid-h", job, "head", template=hashes["head"], **given))
        for number in range(workers + pending):
            runs = number < workers
            given = {"created": self.now, "started": self.now if runs else None}
            given |= {"phase": "Running" if runs else "Pending", "ready": runs, "gpus": 1, "node": "n2" if runs else ""}
            name = f"worker-{number}"
            pods.append(
                Pod(name, namespace, f"uid-{name}", job, "workers", "workers", hashes["workers"], **(given | changes))
            )
        self.observe(pods=tuple(pods))

    def supervisor_reports(
        self, phase: str = "Training", state: str = "running", passed: bool = True, **content: Any
    ) -> None:
        """Set the `/progress` response of a supervisor that works on the current job file."""
        supervisor: Mapping[str, Any] = {
            "job": self.job_file(),
            "state": state,
            "message": content.pop("why", ""),
            "preflight": {"passed": passed, "checks": content.pop("checks", [])},
        }
        self.observe(poll=PollResult(parse_progress({"phase": phase, "supervisor": supervisor, **content}), self.now))

    def polls_fail(self, since: float) -> None:
        """Let polls fail since this Unix time."""
        poll = self.observed.poll or PollResult()
        self.observe(poll=replace(poll, failing_since=since, error="the supervisor does not answer"))

    def trains(self, step: int = 10, **content: Any) -> None:
        """Let all workers run and train."""
        self.has_children()
        self.has_pods(workers=self.job.spec.workers.count)
        self.supervisor_reports(**{"step": step, "totalSteps": 100, "loss": 1.5, **content})


def new_scenario(**sections: Any) -> Scenario:
    """A new job after one decision; nothing of it exists yet."""
    scenario = Scenario(a_cluster_job(**sections))
    scenario.decide()
    return scenario


def training_scenario(**sections: Any) -> Scenario:
    """A job that trains."""
    scenario = new_scenario(**sections)
    scenario.trains()
    scenario.decide()
    return scenario


def cluster_of(decision: Decision) -> dict[str, Any]:
    """The spec of the RayCluster in a decision."""
    (found,) = (manifest["spec"] for manifest in decision.apply if manifest["kind"] == "RayCluster")
    return dict(found)


def replicas(decision: Decision) -> dict[str, int]:
    """Desired replicas by worker group."""
    return {group["groupName"]: group["replicas"] for group in cluster_of(decision)["workerGroupSpecs"]}
