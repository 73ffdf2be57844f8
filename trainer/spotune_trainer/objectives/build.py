"""The objective that a job asks for."""

from __future__ import annotations

from spotune.job import TrainingSpec
from spotune_trainer.objectives.classification import Classification, TokenClassification
from spotune_trainer.objectives.cross_entropy import CrossEntropy
from spotune_trainer.objectives.embedding import Embedding
from spotune_trainer.objectives.kto import Kto
from spotune_trainer.objectives.objective import Objective
from spotune_trainer.objectives.preference import Dpo, Orpo, SimPo
from spotune_trainer.objectives.reward import Reward


def training_objective(training: TrainingSpec) -> Objective:
    """What the steps of a job minimize."""
    preference = training.preference
    match training.objective:
        case "dpo":
            return Dpo(preference.beta or 0.1, preference.label_smoothing)
        case "orpo":
            return Orpo(preference.beta or 0.1)
        case "simpo":
            margin = preference.target_margin
            return SimPo(preference.beta or 2.0, 0.5 if margin is None else margin)
        case "kto":
            return Kto(preference.beta or 0.1, preference.desirable_weight, preference.undesirable_weight)
        case "reward":
            return Reward()
        case "classification":
            return Classification(training.label_smoothing)
        case "tokenClassification":
            return TokenClassification(training.label_smoothing)
        case "embedding":
            embedding = training.embedding
            return Embedding(embedding.pooling, embedding.temperature, normalize=embedding.normalize)
        case "sft":
            return CrossEntropy(training.label_smoothing)


def evaluation_objective(training: TrainingSpec) -> Objective:
    """What evaluations report as the loss: that of the training, but cross-entropy without label smoothing."""
    return training_objective(training.model_copy(update={"label_smoothing": 0.0}))
