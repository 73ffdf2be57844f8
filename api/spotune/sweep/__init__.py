"""The FinetuneSweep: Pydantic models of the resource that searches for hyperparameters with trials of a job."""

from spotune.sweep.finetunesweep import MAX_SWEEP_NAME_LENGTH, SWEEP_KIND, FinetuneSweep
from spotune.sweep.parameters import MAX_PARAMETERS, ParameterSpec
from spotune.sweep.spec import (
    MAX_TRIALS,
    BudgetSpec,
    FinetuneSweepSpec,
    ObjectiveSpec,
    SearchSpec,
    TrialPruningSpec,
    TrialTemplateSpec,
)
from spotune.sweep.status import (
    BestTrialStatus,
    FinetuneSweepStatus,
    TrialCountsStatus,
    TrialEvaluationStatus,
    TrialState,
    TrialStatus,
)

__all__ = [
    "MAX_PARAMETERS",
    "MAX_SWEEP_NAME_LENGTH",
    "MAX_TRIALS",
    "SWEEP_KIND",
    "BestTrialStatus",
    "BudgetSpec",
    "FinetuneSweep",
    "FinetuneSweepSpec",
    "FinetuneSweepStatus",
    "ObjectiveSpec",
    "ParameterSpec",
    "SearchSpec",
    "TrialCountsStatus",
    "TrialEvaluationStatus",
    "TrialPruningSpec",
    "TrialState",
    "TrialStatus",
    "TrialTemplateSpec",
]
