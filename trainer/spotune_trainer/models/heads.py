"""Heads of models that score or classify texts instead of generating them: which models have one, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from spotune.errors import JobError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from spotune.job import FinetuneJob

LABEL_MAPPINGS: Final[Mapping[str, Any]] = {
    "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "tokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
"""transformers' classes by configuration, for each kind of model with labels."""

_REWARD_HEAD: Final = "score"
"""Name of transformers' linear head on the last token of a sequence; classes for encoders have other heads."""
_CLASSIFIERS: Final = ("ForSequenceClassification", "ForTokenClassification")
_POOLER: Final = "pooler"
"""The layer on the first token of BERT and others, which only next-sentence prediction has trained."""
_LEARNED_POSITIONS: Final = ("albert", "bert", "distilbert", "electra", "gpt2")
_POSITIONS_AFTER_PADDING: Final = ("camembert", "roberta", "xlm-roberta")
"""Model types whose positions count from the id of the padding token plus one."""


def configure_head(config: PretrainedConfig, job: FinetuneJob) -> None:
    """Set the number of outputs of the job's model, and the names of its labels.

    Raises:
        JobError: the source has a head for another number of labels.
    """
    if job.spec.model_kind == "reward":
        config.num_labels = 1
    elif job.spec.model_kind in LABEL_MAPPINGS:
        labels, model = job.spec.dataset.labels, job.spec.model
        has_labels = any(name.endswith(_CLASSIFIERS) for name in config.architectures or ())
        if has_labels and model.initialise == "pretrained" and config.num_labels != len(labels):
            names = ", ".join((config.id2label or {}).values())
            raise JobError(
                f"dataset.labels has {len(labels)} labels, and the head of model.source {model.source!r} has "
                f"{config.num_labels} ({names}): name as many, or a source without such a head, such as the model that "
                "it was finetuned from"
            )
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: position for position, label in enumerate(labels)}


def check_classifier(config: PretrainedConfig, job: FinetuneJob) -> None:
    """Check that transformers has a class of this model with a head for the job's labels, and that rows fit in it.

    Raises:
        JobError: it has none, or rows may have more tokens than the model has positions.
    """
    kind, source = job.spec.model_kind, job.spec.model.source
    remote = job.spec.model.trust_remote_code and hasattr(config, "auto_map")
    if config.is_encoder_decoder or not (type(config) in LABEL_MAPPINGS[kind] or remote):
        raise JobError(
            f"training.objective: {kind} is not supported for {config.model_type} models such as {source!r}. Choose "
            "an encoder, such as one of the types bert, roberta or modernbert, or a decoder, such as llama or qwen2."
        )
    _check_positions(config, job)


def check_embedding(config: PretrainedConfig, job: FinetuneJob) -> None:
    """Check that a model can give embeddings of the job's texts.

    Raises:
        JobError: it has an encoder and a decoder, or texts may have more tokens than the model has positions.
    """
    if config.is_encoder_decoder:
        raise JobError(
            f"training.objective: embedding is not supported for {config.model_type} models such as "
            f"{job.spec.model.source!r}, which have an encoder and a decoder: name an encoder or a decoder"
        )
    _check_positions(config, job)


def check_reward_head(model: PreTrainedModel, source: str) -> None:
    """Raise JobError if the model's class for sequence classification does not score the last token."""
    if not isinstance(getattr(model, _REWARD_HEAD, None), torch.nn.Linear):
        raise no_reward_head(model.config, source)


def no_reward_head(config: PretrainedConfig, source: str) -> JobError:
    """The error for a model that cannot become a reward model."""
    return JobError(
        f"training.objective: reward is not supported for {config.model_type} models such as "
        f"{source!r}: transformers has no class of them that scores the last token of a text. Choose "
        "another model, such as one of the types llama, mistral or qwen2."
    )


def head_modules(model: PreTrainedModel) -> list[str]:
    """Names of the modules with parameters that a model has in addition to its base model: its head.

    The pooler of BERT and its like is one of them, since models that predict masked tokens have none. A base model has
    no head, and neither has a model without a base model of its own, such as T5 for generation.
    """
    base = model.base_model
    if base is model:
        return []
    children = [
        name for name, child in model.named_children() if child is not base and any(True for _ in child.parameters())
    ]
    has_pooler = isinstance(getattr(base, _POOLER, None), torch.nn.Module)
    return [*children, *([f"{model.base_model_prefix}.{_POOLER}"] if has_pooler else [])]


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether a model is an encoder such as BERT: it predicts masked tokens, and generates no text."""
    decodes = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes


def max_positions(config: PretrainedConfig) -> int | None:
    """Most tokens that the model has positions for. Relative positions, as T5's, have no limit."""
    learned = _learned_positions(config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) if learned is None else learned
    return positions if isinstance(positions, int) and positions > 0 else None


def remove_pooler(model: PreTrainedModel) -> None:
    """Remove the layer on the first token from a base model: embeddings do not use it, so it would get no gradient."""
    if hasattr(model, _POOLER):
        setattr(model, _POOLER, None)


def may_be_new(parameter: str, model: PreTrainedModel, job: FinetuneJob) -> bool:
    """Whether the source of the job's model may lack a parameter, because it belongs to the head or is not used."""
    if job.spec.model_kind == "embedding":
        return parameter.startswith(f"{_POOLER}.")
    if job.spec.model_kind == "reward":
        return parameter.startswith(f"{_REWARD_HEAD}.")
    return job.spec.has_head and parameter.startswith(tuple(f"{name}." for name in head_modules(model)))


def _check_positions(config: PretrainedConfig, job: FinetuneJob) -> None:
    """Raise JobError if rows may have more tokens than the model has positions."""
    positions = _learned_positions(config)
    if positions is not None and job.spec.dataset.max_length > positions:
        raise JobError(
            f"dataset.maxLength: {job.spec.dataset.max_length} tokens are more than the {positions} positions of the "
            f"{config.model_type} model {job.spec.model.source!r}: reduce it to {positions} or less"
        )


def _learned_positions(config: PretrainedConfig) -> int | None:
    """Number of positions that have an embedding; None if the model computes positions."""
    if config.model_type in _LEARNED_POSITIONS:
        return int(config.max_position_embeddings)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return int(config.max_position_embeddings) - int(config.pad_token_id) - 1
    return None
