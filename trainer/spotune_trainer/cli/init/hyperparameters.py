"""The fields of the section `training`: what is learned from the rows, how fast, and for how long."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Final, Literal

from spotune.errors import JobError
from spotune_trainer.cli.init.decisions import held_out_rows, samples_of
from spotune_trainer.cli.init.formats.labels import desirable_rows, undesirable_rows
from spotune_trainer.cli.init.formats.profile import RowFormat
from spotune_trainer.cli.init.profiles import Choice, DataProfile, MachineProfile, ModelProfile

_LARGE_MODEL: Final = 1e9
_EVALUATIONS_OF_PREFERENCES: Final = 4
"""Evaluations of an epoch of preference pairs, or of answers with a label."""
_SMALLEST_BATCHES: Final = {"kto": 16, "embedding": 32}
"""Smallest batch by objective, where rows of a step learn from each other; 8 for others."""
_LARGEST_BATCHES: Final = {"embedding": 256, "classification": 32, "tokenClassification": 32}
"""Largest batch by objective; 64 for others."""
_LARGEST_RATIO: Final = 4 / 3
"""How many times more desirable answers than others, or fewer, are in order without weights."""

Objective = Literal["sft", "dpo", "orpo", "kto", "embedding", "classification", "tokenClassification"]
_PREFERENCES: Final = ("dpo", "kto")
"""Objectives that keep the model near the one that it starts from."""


def objective_of(data: DataProfile, model: ModelProfile) -> Objective:
    """What is learned: the text, which answers are preferred or desirable, embeddings, or labels.

    Raises:
        JobError: The model has no weights, and so no answers that the objective could keep it near.
    """
    row_format = data.format
    if row_format.query:
        return "embedding"
    if row_format.has_labelled_texts:
        return "tokenClassification" if row_format.label_each_word else "classification"
    if row_format.has_labelled_answers:
        if not model.has_weights:
            raise JobError(
                "objective kto keeps the model near the one that it starts from, and this one starts from random "
                "weights: name a model with weights, or learn the answers with --prompt and --completion, or --messages"
            )
        return "kto"
    if not row_format.chosen:
        return "sft"
    return "dpo" if model.has_weights else "orpo"


def decide_epochs(rows: int, objective: Objective) -> int:
    """Passes over so many training rows."""
    if objective in ("dpo", "kto", "embedding"):
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

    Raises:
        JobError: The model cannot learn from such rows.
    """
    samples, held_out = samples_of(data, model), held_out_rows(data, model)
    objective = objective_of(data, model)
    rows = samples - held_out
    if objective == "embedding" and rows < 2:
        raise JobError("embeddings are learned by comparing rows, and the data has one: add rows of related texts")
    batch = _global_batch_size(rows, machine.workers, objective)
    steps = math.ceil(rows / batch)
    yield from _objective(objective, data, model, training)
    yield _epochs(rows, objective, epochs)
    reason = f"Steps of an epoch: {steps:,}. Small data gets a small batch, for more steps. "
    if objective in _SMALLEST_BATCHES:
        others = "all texts of a step are compared" if objective == "embedding" else "a step estimates kl from its rows"
        reason += f"It is larger than for texts, because {others}. "
    yield Choice("spec.training.globalBatchSize", batch, f"{reason}It is exact for any number of workers.")
    yield Choice("spec.training.learningRate", *_learning_rate(model, training, objective))
    warmup, source = _warmup(model, objective)
    yield Choice(
        "spec.training.scheduler",
        "cosine",
        f"The learning rate rises over the first {warmup:.0%} of the steps{source}, then falls to 0.".replace(
            "%", " %"
        ),
    )
    yield Choice("spec.training.warmupRatio", warmup)
    if held_out:
        yield _evaluation(steps, data.format, objective)


def _warmup(model: ModelProfile, objective: Objective) -> tuple[float, str]:
    """Share of the steps in which the learning rate rises, and where it is from."""
    if objective == "dpo":
        return 0.1, ", as of Zephyr"
    if objective == "embedding":
        return 0.1, ", as in the training overview of sentence-transformers"
    if objective == "kto":
        return 0.1, ", as in examples/mistral-kto-mix"
    return (0.1, ", as of BERT") if model.is_encoder else (0.03, "")


def _objective(objective: Objective, data: DataProfile, model: ModelProfile, training: str) -> Iterator[Choice]:
    """The choices of the objective; none for text that is learned, whose objective is the default."""
    if objective in ("dpo", "orpo"):
        yield from _preference_objective(objective, data.format, model, training)
    elif objective == "kto":
        yield from _kto(data)
    elif objective == "embedding":
        reason = "The model learns embeddings: each text is near to its positive, and far from all others of the step."
        yield Choice("spec.training.objective", objective, reason)
        pooling, reason = "mean", "Encoders: the mean of all tokens, as in Sentence-BERT (Reimers and Gurevych 2019)."
        if not model.is_encoder:
            pooling, reason = "lastToken", "Decoders: only the last token has seen the whole text."
        yield Choice("spec.training.embedding.pooling", pooling, reason)
    elif objective != "sft":
        best = "entityF1 (labels in IOB2 format)" if objective == "tokenClassification" else "macroF1"
        reason = "The model gets a head with an output for each label, and generates no text. To keep the checkpoint "
        reason += f"of the best evaluation, set evaluation.best.metric, such as accuracy or {best}."
        yield Choice("spec.training.objective", objective, reason)


def _kto(data: DataProfile) -> Iterator[Choice]:
    """The choices for answers that are desirable or not."""
    reason = (
        "Rows have an answer, and say whether it is desirable. The model learns to give such answers or not, and is "
        "kept near the model that it starts from, which should already answer such prompts."
    )
    yield Choice("spec.training.objective", "kto", reason)
    reason = "As Ethayarajh et al. 2024. Lower values let the model change more."
    yield Choice("spec.training.preference.beta", 0.1, reason)
    column = next(column for column in data.columns if f"{{{column.name}}}" == data.format.label)
    desirable, undesirable = desirable_rows(column), undesirable_rows(column)
    fewer, more = sorted((desirable, undesirable))
    if not fewer or more / fewer <= _LARGEST_RATIO:
        return
    name = "undesirableWeight" if undesirable < desirable else "desirableWeight"
    reason = f"{desirable:,} desirable answers and {undesirable:,} others then have the same weight in total."
    yield Choice(f"spec.training.preference.{name}", round(more / fewer, 2), reason)


def _preference_objective(
    objective: Objective, row_format: RowFormat, model: ModelProfile, training: str
) -> Iterator[Choice]:
    """The choices for preference pairs."""
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
    if objective == "embedding":
        rule = "1, as in the training overview of sentence-transformers"
        advice = "If accuracyAt1 of the evaluation still rises at the end, train more."
    if objective == "kto":
        rule = "1 for answers with a label, as for preference pairs"
        advice = "More passes soon fit these answers only: watch the rewards and the loss of the evaluation."
    if objective == "dpo":
        rule = "1 for preference pairs, as the recipes of Zephyr and the script of TRL for DPO"
        advice = "More passes soon fit these pairs only: watch rewardAccuracy and the loss of the evaluation."
    reason = f"{rows:,} rows to train on. Epochs: {rule if asked is None else 'as asked'}. {advice}"
    return Choice("spec.training.epochs", asked or decide_epochs(rows, objective), reason)


def _evaluation(steps: int, row_format: RowFormat, objective: Objective) -> Choice:
    every = steps
    reason = "Once an epoch."
    if row_format.chosen or objective == "kto":
        every = math.ceil(steps / _EVALUATIONS_OF_PREFERENCES)
        reason = f"{_EVALUATIONS_OF_PREFERENCES} times an epoch, or in each step of a short one. "
        reason += (
            "rewardAccuracy is the share of the held out pairs whose preferred answer has the higher reward; 0.5 is a "
            "guess."
            if row_format.chosen
            else "rewardChosen and rewardRejected are the mean rewards of desirable answers and of the others."
        )
    elif objective == "sft" and not row_format.text:
        reason += " generate: true with metrics: [loss, exactMatch] also compares generated answers."
    elif objective == "embedding":
        reason += " accuracyAt1 is the share of the held out texts that are nearest to their own positive."
    elif objective != "sft":
        reason += " accuracy is the share of right labels; " + (
            "entityF1 counts whole entities of labels in IOB2 format."
            if objective == "tokenClassification"
            else "macroF1 counts rare labels as much as frequent ones."
        )
    return Choice("spec.training.evaluation.everySteps", every, reason)


def _global_batch_size(rows: int, workers: int, objective: Objective) -> int:
    """Rows per step: so few for a small dataset that an epoch has about 100 steps; at least one for each worker."""
    smallest, largest = _SMALLEST_BATCHES.get(objective, 8), _LARGEST_BATCHES.get(objective, 64)
    sizes = [size for size in (8, 16, 32, 64, 128, 256) if smallest <= size <= largest]
    enough = [size for size in sizes if rows / size >= 100] or [sizes[0]]
    return max(min(max(enough[-1], workers), rows), 1)


def _learning_rate(model: ModelProfile, training: str, objective: Objective) -> tuple[float, str]:
    """The learning rate, and where it is from."""
    if not model.has_weights:
        return 6e-4, "From random weights: as GPT-3 with 125 million parameters (Brown et al. 2020, table 2.1)."
    if objective in _PREFERENCES:
        return (_learning_rate_of_dpo if objective == "dpo" else _learning_rate_of_kto)(model, training)
    if objective == "embedding":
        return 2e-5, "As in the training overview of sentence-transformers."
    if model.is_encoder and training == "full":
        return 2e-5, "Encoders: as BERT, 2e-5 to 5e-5 (Devlin et al. 2019, appendix A.3)."
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


def _learning_rate_of_kto(model: ModelProfile, training: str) -> tuple[float, str]:
    much_lower = "KTO needs a much lower rate than the learning of texts."
    if training != "full":
        return 5e-6, f"{much_lower} Adapters: the same as for DPO."
    if model.parameters >= _LARGE_MODEL:
        return 5e-7, f"{much_lower} As in examples/mistral-kto-mix, with 7 billion parameters."
    return 1e-6, f"{much_lower} The default of TRL's KTOConfig."
