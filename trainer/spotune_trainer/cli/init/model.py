"""Reads what `spotune init` needs to know about a model: configuration, tokenizer, and whether it has weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spotune.custom_resource import API_VERSION
from spotune.errors import JobError, UsageError
from spotune.job import KIND, FinetuneJob
from spotune.job_file.load import parse_job, replace_fields
from spotune.job_file.yaml_file import Document
from spotune.plan.config_reader import ENCODER_MODEL_TYPES, SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.parameters import count_parameters
from spotune_trainer.cli.init.formats.profile import RowFormat
from spotune_trainer.cli.init.profiles import ModelProfile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    from spotune_trainer.models.heads import LABEL_MAPPINGS, is_encoder, max_positions
    from spotune_trainer.models.pretrained import check_vocabulary, load_config, load_tokenizer, read_config

    job = _minimal_job(source, tokenizer)
    found = read_config(job)
    task = "seq2seq" if found.is_encoder_decoder else "causal"
    encodes = is_encoder(found)
    has_weights = _has_weights(source)
    changes = {
        "spec.model.task": task,
        "spec.model.initialise": "pretrained" if has_weights else "random",
        "spec.training.objective": "embedding" if encodes else "sft",
    }
    job = replace_fields(job, changes)
    config, loaded = load_config(job), load_tokenizer(job)
    check_vocabulary(config, loaded)
    values = config.to_dict()
    known = (*SUPPORTED_MODEL_TYPES, *ENCODER_MODEL_TYPES)
    architecture = read_architecture(values) if config.model_type in known else None
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
        max_positions=max_positions(config),
        has_weights=has_weights,
        has_chat_template=loaded.chat_template is not None,
        is_encoder=encodes,
        classifies_texts=type(config) in LABEL_MAPPINGS["classification"],
        separator=f" {loaded.sep_token} " if loaded.sep_token else "\n",
    )
    return profile, loaded


def check_head(job: FinetuneJob, source: str) -> None:
    """Check that a model can get the head that a job needs.

    Args:
        job: The job.
        source: The model, as it was given.

    Raises:
        JobError: It cannot; the message says why.
    """
    from spotune_trainer.models.pretrained import load_config

    if not job.spec.generates_text:
        load_config(replace_fields(job, {"spec.model.source": source}))


def check_format(row_format: RowFormat, model: ModelProfile) -> None:
    """Check that a model learns from such rows.

    Raises:
        UsageError: It does not.
    """
    answers = row_format.completion or row_format.messages or row_format.chosen
    if model.is_encoder and (answers or row_format.is_plain_text):
        raise UsageError(
            "the model is an encoder, which generates no text: give --text with --label, or --query with --positive, "
            "or name a causal model"
        )
    if model.task == "causal":
        return
    if row_format.chosen:
        raise UsageError(
            "--chosen and --rejected: learning from preferences needs a causal model, and this is a seq2seq model; "
            f"learn the preferred answers with --prompt and --completion '{row_format.chosen}'"
        )
    if row_format.label or row_format.query:
        option = "--label" if row_format.label else "--query"
        raise UsageError(f"{option}: seq2seq models learn completions only; name a causal model or an encoder")


def _minimal_job(source: str, tokenizer: str) -> FinetuneJob:
    model = {"source": source, **({"tokenizer": tokenizer} if tokenizer else {})}
    spec = {"model": model, "dataset": {"train": {"source": "."}, "maxLength": 1}, "training": {"epochs": 1}}
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
