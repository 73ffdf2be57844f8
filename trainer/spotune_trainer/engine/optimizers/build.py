"""Build the optimizer that a job names, with its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spotune.job import TrainingSpec
from spotune_trainer.engine.optimizers.adafactor import Adafactor
from spotune_trainer.engine.optimizers.adamw8bit import AdamW8bit
from spotune_trainer.engine.optimizers.muon import Muon
from spotune_trainer.engine.optimizers.schedule_free import ScheduleFreeAdamW


def build_optimizer(model: PreTrainedModel, training: TrainingSpec, *, compiled: bool) -> torch.optim.Optimizer:
    """The optimizer `training.optimizer`. Weight decay applies to matrices: not to norms or biases, T5's included.

    Args:
        model: only its trainable parameters are optimized.
        training: optimizer, learning rate and other hyperparameters.
        compiled: compile the update of `AdamW8bit`; PyTorch's AdamW has a fused kernel in any case.
    """
    groups = _groups(model, training)
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    match training.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, fused=True, **settings)
        case "adamw8bit":
            return AdamW8bit(groups, settings, compiled=compiled)
        case "schedule_free_adamw":
            return ScheduleFreeAdamW(groups, settings)
        case "muon":
            return Muon(groups, settings)
        case "adafactor":
            return Adafactor(groups, {"lr": training.learning_rate})


def _groups(model: PreTrainedModel, training: TrainingSpec) -> list[dict[str, Any]]:
    """Parameter groups by weight decay. With Muon, the matrices that it updates are a group with `momentum`."""
    hidden = hidden_matrices(model) if training.optimizer == "muon" else set[str]()
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [(name, p) for name, p in trainable if p.ndim >= 2 and "bias" not in name]
    others = [p for name, p in trainable if p.ndim < 2 or "bias" in name]
    groups = [
        {
            "params": [p for name, p in decayed if name in hidden],
            "weight_decay": training.weight_decay,
            "momentum": training.muon_momentum,
        },
        {"params": [p for name, p in decayed if name not in hidden], "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Names of the 2-D weights of a model's hidden layers: of neither its embeddings nor its head, for labels too."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    output: Any = model.get_output_embeddings()
    base = model.base_model  # the model itself if it has no head, or is a T5
    heads = [] if base is model else [child for child in model.children() if child is not base]
    of_heads = [parameter for head in heads for parameter in head.parameters()]
    excluded = {id(weight) for weight in (*embeddings, *of_heads, *([] if output is None else [output.weight]))}
    return {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in excluded}
