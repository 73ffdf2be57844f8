"""Load what a job's `model` section names: the transformers configuration, model and tokenizer.

This is the only module that turns a source (`hf://owner/name` or a folder) into a transformers object. Worker, export
and `spotune predict` therefore accept the same sources and raise the same errors.
"""

from __future__ import annotations

import contextlib
import errno
import http
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import logging

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.models.heads import (
    LABEL_MAPPINGS,
    check_classifier,
    check_embedding,
    check_reward_head,
    configure_head,
    head_modules,
    may_be_new,
    no_reward_head,
    remove_pooler,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from spotune.job import FinetuneJob

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Errors of the volume or the Hub, not of the job: another attempt may succeed.
_STORAGE_ERRNOS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT})
_TRANSIENT_STATUSES = frozenset(status for status in http.HTTPStatus if status >= 500 or status == 429)

_CPU = torch.device("cpu")
_MIN_VOCABULARY = 2
_TOKENIZER_HINT = " Name a source that has one in model.tokenizer."

_AUTO_MODELS: Mapping[str, Any] = {
    "seq2seq": AutoModelForSeq2SeqLM,
    "causal": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "embedding": AutoModel,
    "classification": AutoModelForSequenceClassification,
    "tokenClassification": AutoModelForTokenClassification,
}
_MAPPINGS = {"seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "causal": MODEL_FOR_CAUSAL_LM_MAPPING}


def load_config(job: FinetuneJob) -> PretrainedConfig:
    """The transformers configuration of `model.source`, checked against the job's task and attention.

    Raises:
        JobError: the source does not exist, is not a model, or does not fit `model.task` or `execution.attention`.
        InfrastructureError: the Hub could not be reached.
    """
    config = read_config(job)
    if job.spec.model_kind in LABEL_MAPPINGS:
        check_classifier(config, job)
    elif job.spec.model_kind == "embedding":
        check_embedding(config, job)
    else:
        _check_task(config, job)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as in every pretrained T5
    configure_head(config, job)
    if job.spec.execution.attention != "auto":
        config._attn_implementation = job.spec.execution.attention
        _check_attention(config, job)
    return config


def read_config(job: FinetuneJob) -> PretrainedConfig:
    """The transformers configuration of `model.source`, whatever it is a model for.

    Raises:
        JobError: the source does not exist or is not a model.
        InfrastructureError: the Hub could not be reached.
    """
    model = job.spec.model
    with _load_errors("model.source", model.source):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            resolve_source(model.source, "model.source"),
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    return config


def build_model(job: FinetuneJob, *, quantized: bool = False) -> PreTrainedModel:
    """The model to start training from, in `model.dtype`, on the CPU (or partitioned, within `deepspeed.zero.Init`).

    `initialise: random` draws the weights from `training.seed` alone: all ranks and attempts build the same model. So
    does a model with a head for scores or labels with that head, if the source has none.

    Args:
        job: names the model.
        quantized: read the matrices of a pretrained model into 4 bits, as `attach_adapter` would quantize them.

    Raises:
        JobError: the source does not exist, is not a model, has no weights, or does not fit the job.
        InfrastructureError: the Hub could not be reached.
    """
    model, config = job.spec.model, load_config(job)
    auto_model = _AUTO_MODELS[job.spec.model_kind]
    dtype = DTYPES[model.dtype]
    if model.initialise == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.spec.training.seed)
            built: PreTrainedModel = auto_model.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
        return _with_head(built, job)
    with _load_errors("model.source", model.source), torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.spec.training.seed)
        built, report = auto_model.from_pretrained(
            resolve_source(model.source, "model.source"),
            config=config,
            revision=model.revision,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,  # other weight files are pickles, which can run code
            output_loading_info=True,
            **_quantization(job) if quantized else {},
        )
    built = _with_head(built, job)
    missing = sorted(name for name in report["missing_keys"] if not may_be_new(name, built, job))
    if missing:
        raise JobError(
            f"model.source {model.source!r} has no weights for {missing[0]!r} of {type(built).__name__} "
            f"({len(missing)} missing in all): it was probably saved for another task. Name a {model.task} model, or "
            "set model.initialise: random to train from scratch."
        )
    built.train()
    return built


def _quantization(job: FinetuneJob) -> dict[str, Any]:
    from spotune_trainer.models.quantization.nf4_loading import Nf4Config  # imports much of transformers

    return {"quantization_config": Nf4Config(lambda model: head_modules(model) if job.spec.has_head else [])}


def build_on_meta_device(job: FinetuneJob) -> PreTrainedModel:
    """The model of `model.source` on the `meta` device: names, shapes and configurations without memory for weights."""
    with torch.device("meta"):
        return _without_weights(job)


def build_uninitialized(job: FinetuneJob, device: torch.device = _CPU) -> PreTrainedModel:
    """The model of `build_model` with uninitialized parameters, to be filled from a checkpoint.

    Reading or drawing the weights of a large model is the longest part of a worker's start, and is left out here. A
    model with persistent buffers is built by `build_model`, because a checkpoint holds parameters only.

    Args:
        job: names the model.
        device: of the parameters. Buffers are computed on the CPU, whose results differ from a GPU's in the last bits.
    """
    with no_init_weights():
        model = _without_weights(job)
    model.tie_weights()  # no_init_weights skips this as well
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if model.state_dict().keys() - parameters:  # persistent buffers
        return build_model(job)
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter, device=device)
    return model


def _without_weights(job: FinetuneJob) -> PreTrainedModel:
    model, config = job.spec.model, load_config(job)
    built: PreTrainedModel = _AUTO_MODELS[job.spec.model_kind].from_config(
        config, dtype=DTYPES[model.dtype], trust_remote_code=model.trust_remote_code
    )
    if model.initialise == "pretrained" and job.spec.generates_text:
        # If the source has none, the model keeps its default, as in `from_pretrained`.
        with contextlib.suppress(OSError):
            source = resolve_source(model.source, "model.source")
            built.generation_config = GenerationConfig.from_pretrained(source, revision=model.revision)
    return _with_head(built, job)


def _with_head(model: PreTrainedModel, job: FinetuneJob) -> PreTrainedModel:
    """The model, checked and configured for a head for scores or labels, or for embeddings.

    The padding token of the tokenizer tells transformers where a text ends. It is set on the finished model: embeddings
    of a token that was known as padding when they were made get no gradient, and it may be the end-of-text token.

    Raises:
        JobError: it is to be a reward model, and the class for sequence classification does not score the last token.
    """
    if job.spec.model_kind == "reward":
        check_reward_head(model, job.spec.model.source)
    if job.spec.has_head:
        model.config.get_text_config().pad_token_id = load_tokenizer(job).pad_token_id
    if job.spec.model_kind == "embedding":
        remove_pooler(model)
    return model


def load_tokenizer(job: FinetuneJob) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, or else of `model.source`.

    If it has no padding token, the end-of-text token is used for padding.

    Raises:
        JobError: the source does not exist or has no tokenizer, or the tokenizer has no end-of-text token, which
            classifiers and models with embeddings do not need if there is one for padding.
        InfrastructureError: the Hub could not be reached.
    """
    model = job.spec.model
    field, source = ("model.tokenizer", model.tokenizer) if model.tokenizer else ("model.source", model.source)
    revision = "main" if model.tokenizer else model.revision
    with _load_errors(field, source, what="tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            resolve_source(source, field), revision=revision, trust_remote_code=model.trust_remote_code
        )
    # If the files are missing, transformers returns an empty tokenizer for some models: it has special tokens only.
    if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) < _MIN_VOCABULARY:
        raise JobError(f"{field}: no tokenizer can be loaded from {source!r}: it has no vocabulary.{_TOKENIZER_HINT}")
    pads = job.spec.model_kind in ("embedding", *LABEL_MAPPINGS) and tokenizer.pad_token_id is not None
    if tokenizer.eos_token_id is None and not pads:
        raise JobError(
            f"{field}: the tokenizer of {source!r} has no end-of-text token (eos_token), so generation would never "
            "stop. Name a tokenizer that has one."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise JobError if the tokenizer has more tokens than the model has embeddings."""
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise JobError(
            f"model.tokenizer has {len(tokenizer)} tokens but the model's vocabulary has {rows} (vocab_size in its "
            "config.json): the tokenizer is not this model's. Name the tokenizer of this model, or raise vocab_size "
            "when training from scratch."
        )


def load_exported(directory: Path, task: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (on the CPU, in the saved dtype, in eval mode) and tokenizer of an export directory.

    Args:
        directory: the export.
        task: `task` in its manifest.

    Raises:
        JobError: transformers cannot load a model for this task from the directory.
    """
    with _load_errors("export", str(directory)):
        model: PreTrainedModel = _AUTO_MODELS[task].from_pretrained(str(directory), dtype="auto")
    with _load_errors("export", str(directory), what="tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory))
    model.train(False)
    return model, tokenizer


def resolve_source(source: str, field: str) -> str:
    """What transformers loads a source from: the repository id of `hf://owner/name`, or the path of a folder.

    Raises:
        JobError: the source has another scheme, or the folder does not exist.
    """
    if source.startswith("hf://"):
        return source.removeprefix("hf://").strip("/")
    if re.match(r"[a-z0-9]+://", source):
        raise JobError(f"{field}: {source!r} cannot be loaded. Give hf://owner/name or a folder.")
    if not Path(source).is_dir():
        raise JobError(
            f"{field}: there is no folder {source!r}. Give a folder (relative to the job file), or hf://owner/name "
            "for a model on the Hugging Face Hub."
        )
    return source


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which disturb logs and the live view."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_task(config: PretrainedConfig, job: FinetuneJob) -> None:
    task = job.spec.model.task
    remote = job.spec.model.trust_remote_code and hasattr(config, "auto_map")
    if type(config) in _MAPPINGS[task] or remote:
        has_head = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or remote
        if job.spec.model_kind == "reward" and not has_head:
            raise no_reward_head(config, job.spec.model.source)
        return
    other = next((name for name in _MAPPINGS if name != task and type(config) in _MAPPINGS[name]), None)
    hint = f"Set model.task: {other}." if other else "Name a text generation model."
    raise JobError(
        f"model.source {job.spec.model.source!r} is a {config.model_type} model, which is not {task}. {hint}"
    )


def _check_attention(config: PretrainedConfig, job: FinetuneJob) -> None:
    """Raise JobError if the model or this installation lacks `execution.attention`."""
    attention, kind = job.spec.execution.attention, job.spec.model_kind
    mapping = MODEL_MAPPING if kind == "embedding" else LABEL_MAPPINGS.get(kind, _MAPPINGS[job.spec.model.task])
    model = mapping.get(type(config), None)
    support = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}.get(attention)
    if support and model is not None and not getattr(model, support, False):
        raise JobError(f"execution.attention: {config.model_type} models have no {attention}: use auto or eager")
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise JobError(
            "execution.attention: flash_attention_2 needs the package flash-attn in the image (cluster.image), built "
            "for its CUDA and PyTorch: use auto, which takes PyTorch's own flash attention where the model has it"
        )


@contextmanager
def _load_errors(field: str, source: str, what: str = "model") -> Iterator[None]:
    """Turn what transformers raises for a source into a JobError or InfrastructureError that names the field."""
    try:
        with no_progress_bars():
            yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, HfHubHTTPError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = _one_line(error)
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
            raise InfrastructureError(f"{field}: reading {source!r} failed: {reason}") from error
        if source.startswith("hf://") and _is_outage(error):
            raise InfrastructureError(
                f"{field}: the Hugging Face Hub could not be reached for {source!r}: {reason}"
            ) from error
        hint = _hint(error, what)
        raise JobError(f"{field}: no {what} can be loaded from {source!r}: {reason}{hint}") from error


def _is_outage(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a failure of the network or of the Hub."""
    while error is not None:
        if isinstance(error, GatedRepoError):
            return False
        if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError, ConnectionError, TimeoutError)):
            return True
        if isinstance(error, HfHubHTTPError):
            return error.response.status_code in _TRANSIENT_STATUSES
        error = error.__cause__ or error.__context__
    return False


def _hint(error: BaseException, what: str) -> str:
    if what == "tokenizer":
        return _TOKENIZER_HINT
    if "no file named" in str(error) and "safetensors" in str(error):
        return " To train from scratch set model.initialise: random."
    return ""


def _one_line(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
