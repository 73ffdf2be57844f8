"""The status of a sweep: written by the operator, only read by users."""

from typing import Annotated, Any, Literal

from pydantic import Field

from spotune.custom_resource.status import Conditions, StatusSection

TrialState = Literal["Running", "Complete", "Pruned", "Failed"]
TrialParameters = Annotated[
    dict[str, Any], Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
]


class TrialEvaluationStatus(StatusSection):
    """The objective at one evaluation of a trial."""

    step: int
    """Completed optimizer steps before it."""
    value: float
    """Value of the objective."""


class TrialStatus(StatusSection):
    """One trial. It is recorded before its FinetuneJob is created, and stays when that is deleted."""

    number: int
    """Number of the trial, from 0."""
    name: str
    """Name of its FinetuneJob."""
    state: TrialState = "Running"
    """Running, also while its job waits for nodes or is suspended; Complete, Pruned or Failed."""
    parameters: TrialParameters
    """Its parameters, by field of the job's spec."""
    value: float | None = None
    """The objective: of the exported model once it is complete, else of the last evaluation."""
    evaluations: list[TrialEvaluationStatus] = Field(default=[], json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Evaluations that the operator has seen, a sample of them if there are many."""
    rungs: list[float] = Field(default=[], json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """The objective at each rung of asha: that of the first evaluation seen at the rung's step or later."""
    gpu_seconds: float = 0
    """GPU seconds of its worker pods."""
    output: str = ""
    """Location of the trained model."""
    message: str = ""
    """Why it was pruned or has failed."""


class TrialCountsStatus(StatusSection):
    """Number of trials by state."""

    running: int = 0
    """Trials that have started and not ended."""
    complete: int = 0
    """Trials that were trained to the end."""
    pruned: int = 0
    """Trials that were ended early, because others were better."""
    failed: int = 0
    """Trials whose job has failed, or cannot be created."""
    waiting: int = 0
    """Trials that have not started."""


class BestTrialStatus(StatusSection):
    """The best complete trial."""

    number: int
    """Number of the trial."""
    name: str
    """Name of its FinetuneJob."""
    value: float
    """The objective of its exported model."""
    parameters: TrialParameters
    """Its parameters."""
    output: str = ""
    """Location of the trained model: pvc://claim/path, or its URL in the job's bucket."""


class FinetuneSweepStatus(StatusSection):
    """Progress of a sweep."""

    observed_generation: int = 0
    """metadata.generation that this status was computed for."""
    phase: str = ""
    """Phase of the sweep, for display."""
    counts: TrialCountsStatus = TrialCountsStatus()
    """Number of trials by state."""
    best: BestTrialStatus | None = None
    """The best complete trial."""
    gpu_hours: float = 0
    """GPU hours of all trials."""
    trials: list[TrialStatus] = Field(default=[], json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """The trials that have started, by number."""
    conditions: Conditions = Field(default=[])
    """Conditions: Ready, Reconciling, Stalled, Complete, Failed, Suspended."""
