"""How a model is trained and evaluated: hyperparameters, evaluations, and code of the user's own."""

from spotune.job.training.evaluation import BestSpec, EarlyStoppingSpec, EvaluationSpec, HarnessSpec, SqlSpec
from spotune.job.training.hyperparameters import TrainingSpec

__all__ = ["BestSpec", "EarlyStoppingSpec", "EvaluationSpec", "HarnessSpec", "SqlSpec", "TrainingSpec"]
