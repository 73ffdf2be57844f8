"""Moments in the life of a job, for the tests of decisions: what is seen, and what was said before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from spotune.job import Condition, FinetuneJob, FinetuneJobStatus
from spotune_operator.children.config import JOB_FILE, config_map
from spotune_operator.kube.conditions import find
from spotune_operator.observe.state import Child, Observed, Pod
from spotune_operator.observe.supervisor_status import Reading, understood
from spotune_operator.reconcile.decide import Decision, decide
from spotune_operator.reconcile.desired_children import render
from spotune_operator.reconcile.pinned import place_as_pinned, template_hashes
from spotune_operator.settings import Settings
from tests.api.support.job_files import a_job

NOW = 1_800_000_000.0
SETTINGS = Settings(image="spotune/trainer:1")
CLASSES = {"shared": {"metadata": {"name": "shared", "annotations": {}}, "provisioner": "example.org/nfs"}}


def a_cluster_job(**sections: Any) -> FinetuneJob:
    """A small job that can be placed in a cluster of no known cloud, with sections of its spec replaced."""
    given = {
        "cluster": {"provider": "none"},
        "storage": {"storageClassName": "shared", "size": "10Gi"},
        "training": {"epochs": 3, "globalBatchSize": 96},
        "dataset": {"train": {"source": "shards/train"}},
        "workers": {"count": 2, "min": 1},
    }
    return a_job(**(given | sections))


@dataclass
class Life:
    """A job that is decided about again and again while tests change what is seen."""

    job: FinetuneJob
    generation: int = 1
    status: FinetuneJobStatus = field(default_factory=FinetuneJobStatus)
    seen: Observed = field(default_factory=lambda: Observed(storage_classes=CLASSES))
    now: float = NOW
    settings: Settings = SETTINGS

    def decide(self, *, after: float = 0.0) -> Decision:
        """Let some seconds pass and decide; the status is kept for the next time."""
        self.now += after
        decision = decide(
            render(self.job, "uid-1", self.status.pinned, self.seen.provider_ids, self.settings),
            generation=self.generation,
            previous=self.status,
            seen=self.seen,
            now=self.now,
            settings=self.settings,
        )
        self.status = decision.status
        return decision

    def see(self, **changes: Any) -> None:
        """Replace parts of what is seen."""
        self.seen = replace(self.seen, **changes)

    def edit(self, job: FinetuneJob) -> None:
        """The user changes the spec."""
        self.job = job
        self.generation += 1

    def condition(self, name: str) -> Condition:
        """A condition of the status as it is now."""
        found = find(self.status.conditions, name)
        assert found is not None, f"{name} of {[each.type for each in self.status.conditions]}"
        return found

    def is_true(self, name: str) -> bool:
        """Whether a condition holds."""
        return self.condition(name).status == "True"

    # What there is to see

    def job_file(self) -> str:
        """The hash by which a supervisor names the job file that it works by."""
        placed = place_as_pinned(self.job, self.status.pinned, (), self.settings, "uid-1")
        return sha256(config_map(placed)["data"][JOB_FILE].encode()).hexdigest()

    def has_children(self, **cluster: Any) -> None:
        """Storage is bound, and there is a RayCluster."""
        name = f"spotune-{self.job.metadata.name}"
        namespace, job = self.job.metadata.namespace, self.job.metadata.name
        claim = Child("PersistentVolumeClaim", namespace, name, "uid-c", job, "1", phase="Bound", capacity="10Gi")
        ray = Child("RayCluster", namespace, name, "uid-r", job, "2", **cluster)
        self.see(children={"PersistentVolumeClaim": claim, "RayCluster": ray})

    def has_pods(self, head: bool = True, workers: int = 0, pending: int = 0, **changes: Any) -> None:
        """A running head, running workers, and workers that wait; all of the templates that are wanted."""
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
        self.see(pods=tuple(pods))

    def supervisor_says(
        self, phase: str = "Training", state: str = "running", passed: bool = True, **content: Any
    ) -> None:
        """An answer of `/progress`, by a supervisor that works by the job as it is now."""
        supervisor: Mapping[str, Any] = {
            "job": self.job_file(),
            "state": state,
            "message": content.pop("why", ""),
            "preflight": {"passed": passed, "checks": content.pop("checks", [])},
        }
        self.see(reading=Reading(understood({"phase": phase, "supervisor": supervisor, **content}), self.now))

    def is_silent(self, since: float) -> None:
        """The supervisor has not answered since then."""
        reading = self.seen.reading or Reading()
        self.see(reading=replace(reading, failing_since=since, error="the supervisor does not answer"))

    def trains(self, step: int = 10, **content: Any) -> None:
        """Everything runs as asked."""
        self.has_children()
        self.has_pods(workers=self.job.spec.workers.count)
        self.supervisor_says(step=step, totalSteps=100, loss=1.5, **content)


def a_life(**sections: Any) -> Life:
    """A new job, decided about once: nothing of it is there yet."""
    life = Life(a_cluster_job(**sections))
    life.decide()
    return life


def a_training_life(**sections: Any) -> Life:
    """A job that trains."""
    life = a_life(**sections)
    life.trains()
    life.decide()
    return life


def cluster_of(decision: Decision) -> dict[str, Any]:
    """The RayCluster's spec that a decision wants."""
    (found,) = (manifest["spec"] for manifest in decision.apply if manifest["kind"] == "RayCluster")
    return dict(found)


def replicas(decision: Decision) -> dict[str, int]:
    """Worker pods wanted by group."""
    return {group["groupName"]: group["replicas"] for group in cluster_of(decision)["workerGroupSpecs"]}
