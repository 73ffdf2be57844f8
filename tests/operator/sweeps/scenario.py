"""A FinetuneSweep with a simulated API server: decisions are executed, in part if a test wants that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spotune.custom_resource import Condition
from spotune.sweep import FinetuneSweep, FinetuneSweepStatus, TrialStatus
from spotune_operator.kube.conditions import find
from spotune_operator.settings import Settings
from spotune_operator.sweeps.decide import SweepDecision, decide_sweep
from spotune_operator.sweeps.state import ObservedSweep, trial_job_view
from tests.api.support.sweep_files import a_sweep

NOW = 1_800_000_000.0
SETTINGS = Settings(image="spotune/trainer:1")
UID = "uid-of-the-sweep"
GRID: dict[str, Any] = {
    "parameters": {
        "training.learningRate": {"values": [1e-5, 1e-4, 1e-3]},
        "training.globalBatchSize": {"values": [32, 64]},
    },
    "search": {"algorithm": "grid"},
    "earlyStopping": {},
    "maxConcurrent": 2,
}  # fmt: skip
"""Six trials, two at a time, none of them pruned."""
ASHA: dict[str, Any] = {
    "parameters": {"training.seed": {"integer": [1, 9]}},
    "search": {"algorithm": "grid"},
    "earlyStopping": {"algorithm": "asha", "minSteps": 100, "reductionFactor": 3},
    "maxConcurrent": 9,
}
"""Nine trials at once, which are compared after 100, 300 and 900 steps."""


@dataclass
class SweepScenario:
    """A sweep, its status, and the FinetuneJobs that exist, by name."""

    sweep: FinetuneSweep = field(default_factory=lambda: a_sweep(**GRID))
    generation: int = 1
    status: FinetuneSweepStatus = field(default_factory=FinetuneSweepStatus)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    creations: list[str] = field(default_factory=list)
    taken: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    now: float = NOW

    def decide(self) -> SweepDecision:
        """Decide; nothing is written or executed."""
        jobs = [trial_job_view(raw) for raw in self.jobs.values()]
        trials = {job.number: job for job in jobs if job.number is not None}
        return decide_sweep(
            self.sweep,
            uid=UID,
            generation=self.generation,
            previous=self.status,
            observed=ObservedSweep(trials, self.taken, self.refused),
            now=self.now,
            settings=SETTINGS,
        )

    def reconcile(self, actions: int | None = None) -> SweepDecision:
        """Decide, write the status, and execute the decision.

        Args:
            actions: Stop after this many: the first is the status, the others patches and creations. None: all.
        """
        decision = self.decide()
        steps: list[Callable[[], None]] = [partial(setattr, self, "status", roundtrip(decision.status))]
        steps += [partial(self.patch, patch.job.name, patch.changes) for patch in decision.patch]
        steps += [partial(self.create, manifest) for manifest in decision.create]
        for step in steps[:actions]:
            step()
        return decision

    def create(self, manifest: dict[str, Any]) -> None:
        """Create a job, unless one of its name exists."""
        name = manifest["metadata"]["name"]
        if name not in self.jobs:
            self.creations.append(name)
            self.jobs[name] = copy.deepcopy(manifest)
            self.jobs[name]["metadata"]["uid"] = f"uid-of-{name}"

    def patch(self, name: str, changes: dict[str, Any]) -> None:
        """Merge changes into a job."""
        self.jobs[name] = apply_merge_patch(self.jobs[name], changes)

    # What jobs do

    def name(self, number: int) -> str:
        return self.sweep.trial_name(number)

    def report(self, number: int, **status: Any) -> None:
        """Merge fields into the status of a job."""
        self.patch(self.name(number), {"status": status})

    def evaluates(self, number: int, step: int, value: float) -> None:
        self.report(number, phase="Training", step=step, evalStep=step, evalLoss=value)

    def completes(self, number: int, value: float | None = None) -> None:
        found = {} if value is None else {"evalLoss": value, "evalStep": 1000}
        done = [{"type": "Complete", "status": "True", "reason": "Trained", "message": ""}]
        output = f"pvc://claim/{self.name(number)}/export"
        self.report(number, phase="Complete", conditions=done, output=output, step=1000, **found)

    def has_condition(self, number: int, name: str, reason: str, message: str) -> None:
        self.report(number, conditions=[{"type": name, "status": "True", "reason": reason, "message": message}])

    def fails(self, number: int) -> None:
        self.has_condition(number, "Failed", "AppError", "the loss is not finite")

    # What there is

    def trial(self, number: int) -> TrialStatus:
        (found,) = [trial for trial in self.status.trials if trial.number == number]
        return found

    def states(self) -> str:
        """The first letters of the states of all trials, by number: `CPR`."""
        return "".join(trial.state[0] for trial in self.status.trials)

    def condition(self, name: str) -> Condition:
        found = find(self.status.conditions, name)
        assert found is not None
        return found

    def suspended(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job["spec"].get("suspend")]


def roundtrip(status: FinetuneSweepStatus) -> FinetuneSweepStatus:
    """A status as the API server returns it."""
    return FinetuneSweepStatus.model_validate_json(status.model_dump_json(exclude_none=True))


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """An object after a merge patch (RFC 7396), as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_merge_patch(merged.get(name), value)
    return merged


def run_to_the_end(scenario: SweepScenario, values: Sequence[float]) -> None:
    """Reconcile until the sweep has ended; each job completes with the value of its number, one after the other."""
    for _ in range(200):
        scenario.reconcile()
        if scenario.status.phase in ("Complete", "Failed"):
            return
        running = [trial.number for trial in scenario.status.trials if trial.state == "Running"]
        number = next((number for number in running if scenario.name(number) in scenario.jobs), None)
        if number is not None:
            scenario.completes(number, values[number])
    raise AssertionError(f"it has not ended: {scenario.status.phase}, {scenario.states()}")
