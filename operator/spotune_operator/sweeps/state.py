"""The observed state of a sweep: its trials as the FinetuneJobs that the API server has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spotune_operator.children.trial import (
    PARAMETERS_ANNOTATION,
    PRUNED_LABEL,
    SUSPENDED_ANNOTATION,
    SWEEP_LABEL,
    TRIAL_LABEL,
)
from spotune_operator.observe.job_services import controller_uid

SweepKey = tuple[str, str]
"""Namespace and name of a sweep."""


@dataclass(frozen=True)
class TrialJob:
    """The FinetuneJob of a trial.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        sweep: Name of the sweep, by its label.
        owner: uid of the object that controls it; empty without one.
        number: Number of the trial; None if its label is no number.
        parameters: Parameters of the trial, by its annotation; None without a valid one.
        is_pruned: Whether it has the label of pruned trials.
        suspended_by_sweep: Whether the sweep has suspended it.
        suspend: Its ``spec.suspend``.
        deleting: Whether it is being deleted.
        has_function: Whether it has a training function of the user.
        phase: Its ``status.phase``.
        conditions: Its conditions with status ``True``: message by type, and reason by type.
        step: Completed steps.
        loss: Training loss of the last step.
        eval_step: Completed steps before the last evaluation; None before the first.
        scores: Values of the last evaluation by metric.
        gpu_seconds: GPU seconds used so far.
        output: Location of the trained model; empty before it is trained.
    """

    namespace: str
    name: str
    uid: str
    sweep: str = ""
    owner: str = ""
    number: int | None = None
    parameters: Mapping[str, Any] | None = None
    is_pruned: bool = False
    suspended_by_sweep: bool = False
    suspend: bool = False
    deleting: bool = False
    has_function: bool = False
    phase: str = ""
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step: int = 0
    loss: float | None = None
    eval_step: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    output: str = ""

    def evaluation(self, metric: str) -> tuple[int, float] | None:
        """Step and value of the last evaluation by a metric; None if it has none yet.

        The loss of a training function is that of its last report.
        """
        if self.has_function and metric == "loss":
            return (self.step, self.loss) if self.loss is not None and self.step else None
        value = self.scores.get(metric)
        return (self.eval_step, value) if value is not None and self.eval_step is not None else None

    def message(self, condition: str) -> str | None:
        """The message of a condition that is true; None if it is not."""
        found = self.conditions.get(condition)
        return found[1] if found is not None else None


@dataclass(frozen=True)
class ObservedSweep:
    """The observed state of a sweep: all input of a decision but the sweep itself.

    Attributes:
        trials: The FinetuneJobs of its trials, by number.
        taken: Names of other FinetuneJobs of its namespace, which a trial cannot have.
        refused: The API server's message for each trial that it rejected at the last attempt, by name.
    """

    trials: Mapping[int, TrialJob] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


def trial_job_view(raw: Mapping[str, Any]) -> TrialJob:
    """The view of a FinetuneJob with the label of a sweep."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    status = raw.get("status") or {}
    seconds = status.get("gpuSeconds") or {}
    loss = {"loss": status["evalLoss"]} if status.get("evalLoss") is not None else {}
    number = labels.get(TRIAL_LABEL, "")
    return TrialJob(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        sweep=labels.get(SWEEP_LABEL, ""),
        owner=controller_uid(raw),
        number=int(number) if number.isdecimal() else None,
        parameters=_parameters(annotations.get(PARAMETERS_ANNOTATION, "")),
        is_pruned=PRUNED_LABEL in labels,
        suspended_by_sweep=SUSPENDED_ANNOTATION in annotations,
        suspend=bool(spec.get("suspend")),
        deleting="deletionTimestamp" in metadata,
        has_function=any((spec.get("training") or {}).get(field) for field in ("function", "command")),
        phase=str(status.get("phase", "")),
        conditions={
            each["type"]: (each.get("reason", ""), each.get("message", ""))
            for each in status.get("conditions") or ()
            if each["status"] == "True"
        },
        step=status.get("step") or 0,
        loss=status.get("loss"),
        eval_step=status.get("evalStep"),
        scores=loss | (status.get("evalScores") or {}),
        gpu_seconds=float(seconds.get("spot") or 0) + float(seconds.get("onDemand") or 0),
        output=str(status.get("output") or ""),
    )


def _parameters(text: str) -> Mapping[str, Any] | None:
    """The mapping in a JSON text; None if it has none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
