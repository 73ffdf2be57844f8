"""Reads what `spotune init` needs to know about a model: configuration, tokenizer, and whether it has weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spotune.custom_resource import API_VERSION
from spotune.errors import JobError
from spotune.job import KIND, FinetuneJob
from spotune.job_file.load import parse_job, replace_fields
from spotune.job_file.yaml_file import Document
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.parameters import count_parameters
from spotune_trainer.cli.init.profiles import ModelProfile

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_PICKLES = (".bin", ".pt", ".pth")


def read_model(source: str, tokenizer: str) -> tuple[ModelProfile, PreTrainedTokenizerBase]:
    """The profile of a model, and its tokenizer.

    Args:
        source: A folder, or `hf://owner/name`.
        tokenizer: Source of the tokenizer; empty: the model's own.

    Raises:
        JobError: The source is not a model that can be trained, or has no usable tokenizer; the message says why.
        InfrastructureError: The Hub could not be reached.
    """
    from spotune_trainer.models.pretrained import check_vocabulary, load_config, load_tokenizer, read_config

    job = _minimal_job(source, tokenizer)
    task = "seq2seq" if read_config(job).is_encoder_decoder else "causal"
    has_weights = _has_weights(source)
    changes = {"spec.model.task": task, "spec.model.initialise": "pretrained" if has_weights else "random"}
    job = replace_fields(job, changes)
    config, loaded = load_config(job), load_tokenizer(job)
    check_vocabulary(config, loaded)
    values = config.to_dict()
    architecture = read_architecture(values) if config.model_type in SUPPORTED_MODEL_TYPES else None
    if architecture is not None:
        parameters = count_parameters(architecture, pretrained=has_weights).total
    else:
        from spotune_trainer.models.pretrained import build_on_meta_device

        parameters = build_on_meta_device(job).num_parameters()
    profile = ModelProfile(
        source=source,
        tokenizer=tokenizer,
        task=job.spec.model.task,
        model_type=config.model_type,
        parameters=parameters,
        architecture=architecture,
        max_positions=_max_positions(config),
        has_weights=has_weights,
        has_chat_template=loaded.chat_template is not None,
    )
    return profile, loaded


def _minimal_job(source: str, tokenizer: str) -> FinetuneJob:
    model = {"source": source, **({"tokenizer": tokenizer} if tokenizer else {})}
    spec = {"model": model, "dataset": {"train": {"source": "."}}, "training": {"epochs": 1}}
    return parse_job(Document({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "init"}, "spec": spec}))


def _has_weights(source: str) -> bool:
    """Whether a source has weights. A folder may hold a configuration only; on the Hub a model is assumed to have some.

    Raises:
        JobError: A folder has weights only in files that are not loaded.
    """
    if "://" in source:
        return True
    names = [path.name for path in Path(source).iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return True
    pickles = sorted(name for name in names if name.endswith(_PICKLES) and "model" in name)
    if pickles:
        raise JobError(
            f"model.source: {source} has weights only as {pickles[0]}, a pickle, which can run code and is not loaded. "
            "Save the model again with transformers: save_pretrained writes safetensors."
        )
    return False


def _max_positions(config: PretrainedConfig) -> int | None:
    """Most tokens that the model has positions for. Relative positions, as T5's, have no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
