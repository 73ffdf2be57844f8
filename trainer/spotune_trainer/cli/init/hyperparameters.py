"""The fields of the section `training`: what is learned from the rows, how fast, and for how long."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from spotune_trainer.cli.init.decisions import held_out_rows, samples_of
from spotune_trainer.cli.init.profiles import Choice, DataProfile, MachineProfile, ModelProfile, RowFormat

_LARGE_MODEL: Final = 1e9
_EVALUATIONS_OF_PAIRS: Final = 4
"""Evaluations of an epoch of preference pairs."""

Objective = Literal["sft", "dpo", "orpo"]


def objective_of(data: DataProfile, model: ModelProfile) -> Objective:
    """What is learned: the text, or with preference pairs which answer is preferred."""
    if not data.format.chosen:
        return "sft"
    return "dpo" if model.has_weights else "orpo"


def decide_epochs(rows: int, objective: Objective) -> int:
    """Passes over so many training rows."""
    if objective == "dpo":
        return 1
    return 3 if rows <= 50_000 else 2 if rows <= 200_000 else 1


def decide_training(
    data: DataProfile, model: ModelProfile, machine: MachineProfile, training: str, epochs: int | None
) -> Iterator[Choice]:
    """The choices of the section `training`.

    Args:
        data: The rows.
        model: The model.
        machine: The workers.
        training: full, lora or qlora.
        epochs: Passes over the rows; None: by their number.
    """
    samples, held_out = samples_of(data, model), held_out_rows(data, model)
    objective = objective_of(data, model)
    rows = samples - held_out
    batch = _global_batch_size(rows, machine.workers)
    steps = math.ceil(rows / batch)
    yield from _objective(objective, data.format, model, training)
    yield _epochs(rows, objective, epochs)
    yield Choice(
        "spec.training.globalBatchSize",
        batch,
        f"Steps of an epoch: {steps:,}. Small data gets a small batch, for more steps. It is exact for any number of "
        "workers.",
    )
    yield Choice("spec.training.learningRate", *_learning_rate(model, training, objective))
    warmup, source = (0.1, ", as of Zephyr") if objective == "dpo" else (0.03, "")
    yield Choice(
        "spec.training.scheduler",
        "cosine",
        f"The learning rate rises over the first {warmup:.0%} of the steps{source}, then falls to 0.".replace(
            "%", " %"
        ),
    )
    yield Choice("spec.training.warmupRatio", warmup)
    if held_out:
        yield _evaluation(steps, data.format)


def _objective(objective: Objective, row_format: RowFormat, model: ModelProfile, training: str) -> Iterator[Choice]:
    """The choices for preference pairs; none for other rows, whose objective is the default."""
    if objective == "sft":
        return
    rate, _ = _learning_rate(model, training, "sft")
    learned = f"completion: {json.dumps(row_format.chosen, ensure_ascii=False)}"
    if not row_format.prompt:
        learned = f"messages: {json.dumps(row_format.chosen.strip('{}'), ensure_ascii=False)} and trainOn: last"
    instead = (
        f" To learn only the preferred answers: objective: sft{' without preference' * (objective == 'dpo')}, "
        f"learningRate: {rate:.1e}, and in dataset {learned} instead of chosen and rejected."
    )
    if objective == "orpo":
        reason = (
            "The model starts from random weights, so it has no answers yet that dpo could keep it near. orpo learns "
            "the chosen answers, too, by cross-entropy."
        )
        yield Choice("spec.training.objective", objective, reason + instead)
        return
    reason = (
        "Rows have a preferred and a rejected answer. The model learns to prefer the one, and is kept near the model "
        "that it starts from, which should already answer such prompts: finetune a base model on answers first. orpo "
        "and simpo are other objectives for such rows."
    )
    yield Choice("spec.training.objective", objective, reason + instead)
    reason = "As Rafailov et al. 2023; the recipe of Zephyr has 0.01. Lower values let the model change more."
    yield Choice("spec.training.preference.beta", 0.1, reason)


def _epochs(rows: int, objective: Objective, asked: int | None) -> Choice:
    rule = "3 up to 50,000 rows (as Stanford Alpaca), 2 up to 200,000, else 1"
    advice = "If the evaluation loss rises, train less."
    if objective == "dpo":
        rule = "1 for preference pairs, as the recipes of Zephyr and the script of TRL for DPO"
        advice = "More passes soon fit these pairs only: watch rewardAccuracy and the loss of the evaluation."
    reason = f"{rows:,} rows to train on. Epochs: {rule if asked is None else 'as asked'}. {advice}"
    return Choice("spec.training.epochs", asked or decide_epochs(rows, objective), reason)


def _evaluation(steps: int, row_format: RowFormat) -> Choice:
    every = steps
    reason = "Once an epoch. generate: true with metrics: [loss, exactMatch] also compares generated answers."
    if row_format.text:
        reason = "Once an epoch."
    elif row_format.chosen:
        every = math.ceil(steps / _EVALUATIONS_OF_PAIRS)
        reason = (
            f"{_EVALUATIONS_OF_PAIRS} times an epoch, or in each step of a short one. rewardAccuracy is the share of "
            "the held out pairs whose preferred answer has the higher reward; 0.5 is a guess."
        )
    return Choice("spec.training.evaluation.everySteps", every, reason)


def _global_batch_size(rows: int, workers: int) -> int:
    """Rows per step: so few for a small dataset that an epoch has about 100 steps; at least one for each worker."""
    sizes: Sequence[int] = (8, 16, 32, 64)
    enough = [size for size in sizes if rows / size >= 100] or [sizes[0]]
    return max(min(max(enough[-1], workers), rows), 1)


def _learning_rate(model: ModelProfile, training: str, objective: Objective) -> tuple[float, str]:
    """The learning rate, and where it is from."""
    if not model.has_weights:
        return 6e-4, "From random weights: as GPT-3 with 125 million parameters (Brown et al. 2020, table 2.1)."
    if objective == "dpo":
        return _learning_rate_of_dpo(model, training)
    if training != "full":
        return (
            2e-4,
            "Adapters: as QLoRA up to 13 billion parameters (Dettmers et al. 2023); half of it for larger ones.",
        )
    if model.task == "seq2seq":
        return 1e-4, "T5 with AdamW: 1e-4 to 3e-4 (documentation of T5 in transformers)."
    if model.parameters >= _LARGE_MODEL:
        return 2e-5, "All weights of a model with a billion parameters or more: as Stanford Alpaca and Llama 2."
    return 5e-5, "All weights of a small model: the default of transformers.TrainingArguments."


def _learning_rate_of_dpo(model: ModelProfile, training: str) -> tuple[float, str]:
    much_lower = "DPO needs a much lower rate than the learning of texts."
    if training != "full":
        return 5e-6, f"{much_lower} Adapters: as Zephyr with QLoRA (recipe of the alignment-handbook)."
    if model.parameters >= _LARGE_MODEL:
        return 5e-7, f"{much_lower} As Zephyr with 7 billion parameters (Tunstall et al. 2023)."
    return (
        1e-6,
        f"{much_lower} As Rafailov et al. 2023, there with RMSprop, and the default of TRL's DPOConfig.",
    )
