"""Requests and settings as arguments of vLLM. Pure functions on plain values: nothing here imports vLLM.

vLLM's sampler (its model runner V2) adds Gumbel noise that depends on the seed, the absolute position and the token's
id, as `spotune_serve.engine.sampling` does. The two draw different tokens from one seed, but both continue a sequence
with the tokens that an undisturbed one has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_serve.engine.base import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    PromptTooLongError,
    SamplingParams,
    TokenLogprob,
    UnsupportedFormatError,
    UnsupportedToolChoiceError,
    check_names_and_tokens,
)

MAX_LOGPROBS = 20
"""Maximum `logprobs` of a request, as in OpenAI's API."""
MAX_BIASED_TOKENS = 1024
"""Maximum number of tokens in a `logit_bias`: the size of vLLM's buffers."""
GENERATED_TOKENS = "generated_tokens"
"""Key in vLLM's `extra_args`: how many tokens at the end of the prompt earlier replicas have generated."""
WORKER_EXTENSION = "spotune_serve.engine.vllm_worker.WorkerExtension"
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be started with."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_MAX_RESIDENT_ADAPTERS = 8
"""Adapters that one batch can use. More of them wait in the host's memory."""


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs. `for_gpus` chooses what depends on a replica's share of the GPUs.

    Attributes:
        max_batch_size: maximum number of sequences that decode at once; others wait.
        max_sequence_length: maximum tokens of a sequence; None: the model's, or less if the GPU's memory is too small.
        tensor_parallel_size: number of GPUs that share each layer.
        memory_fraction: part of the GPU's memory that weights and caches may use, in (0, 1].
        batch_invariant: use kernels whose results do not depend on the batch, so that a continued answer can have the
            same tokens in bfloat16, too. Needs an NVIDIA GPU of compute capability 8.0 or more.
        attention_backend: vLLM's name of the attention kernels, for example FLASH_ATTN; empty: vLLM's choice, or
            TRITON_ATTN with `batch_invariant`.
    """

    max_batch_size: int = 256
    max_sequence_length: int | None = None
    tensor_parallel_size: int = 1
    memory_fraction: float = 0.9
    batch_invariant: bool = False
    attention_backend: str = ""

    @classmethod
    def for_gpus(cls, gpus: float, max_batch_size: int | None = None) -> VllmSettings:
        """All of the given GPUs, or the given part of one.

        Args:
            gpus: GPUs of the replica; more than 0.
            max_batch_size: see above; None: the default.
        """
        return cls(
            max_batch_size=max_batch_size or cls.max_batch_size,
            tensor_parallel_size=max(1, int(gpus)),
            memory_fraction=cls.memory_fraction * min(1.0, gpus),
        )


@dataclass(frozen=True)
class VllmModel:
    """What requests are checked against, and what the model's generation configuration adds to each of them.

    Attributes:
        vocabulary: number of token ids.
        max_sequence_length: maximum tokens of a sequence.
        eos_token_ids: tokens that end a sequence.
        repetition_penalty: divides the positive logits of all earlier tokens and multiplies the negative ones; 1 is
            off.
        adapters: names of the LoRA adapters.
    """

    vocabulary: int
    max_sequence_length: int
    eos_token_ids: frozenset[int]
    repetition_penalty: float = 1.0
    adapters: frozenset[str] = frozenset()


def engine_arguments(directory: Path, settings: VllmSettings, adapter_ranks: Mapping[str, int]) -> dict[str, Any]:
    """Arguments for vLLM's `AsyncEngineArgs`.

    FlashAttention 3, vLLM's choice on Hopper, has other tiles for a batch that only decodes than for one that also
    reads prompts, and adds up in another order (vllm-project/vllm#47069 and #51902). The Triton kernel has one size.

    Args:
        directory: the model.
        settings: how vLLM runs.
        adapter_ranks: rank of each LoRA adapter, at most 512.
    """
    arguments: dict[str, Any] = {
        "model": str(directory),
        "load_format": "safetensors",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": settings.max_sequence_length or -1,
        "max_num_seqs": settings.max_batch_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": settings.memory_fraction,
        "attention_backend": settings.attention_backend or ("TRITON_ATTN" if settings.batch_invariant else None),
        "enable_prefix_caching": True,
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if adapter_ranks:
        arguments |= {
            "enable_lora": True,
            "max_loras": min(len(adapter_ranks), _MAX_RESIDENT_ADAPTERS),
            "max_cpu_loras": len(adapter_ranks),
            "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= max(adapter_ranks.values())),
        }
    return arguments


def check_request(request: GenerationRequest, model: VllmModel) -> None:
    """Refuse what vLLM cannot generate.

    Raises:
        PromptTooLongError: the sequence has no space for a new token.
        UnknownAdapterError: the adapter is not loaded.
        UnsupportedFormatError: the answer has a JSON schema, or must call a tool.
        ValueError: the prompt is empty, a token id is outside the vocabulary, or a parameter is not supported; the
            message names it.
    """
    check_names_and_tokens(request, model.adapters, model.vocabulary)
    if model.max_sequence_length - len(request.prompt) < max(1, len(request.generated)):
        raise PromptTooLongError(
            f"the prompt has {len(request.prompt)} tokens and {len(request.generated)} were generated, which leaves no "
            f"space for a new one: the maximum is {model.max_sequence_length}."
        )
    _check_sampling(request.sampling)


def stop_tokens(sampling: SamplingParams, model: VllmModel) -> frozenset[int]:
    """All tokens that end a sequence."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else model.eos_token_ids)


def finish_reason(request: GenerationRequest, model: VllmModel) -> FinishReason | None:
    """Why a sequence ends after the tokens of earlier replicas; None if it goes on."""
    if request.generated and request.generated[-1] in stop_tokens(request.sampling, model):
        return "stop"
    return "length" if _remaining_tokens(request, model) <= 0 else None


def sampling_arguments(request: GenerationRequest, model: VllmModel) -> dict[str, Any]:
    """Arguments for vLLM's `SamplingParams`; the prompt is then the request's, followed by its generated tokens.

    Stop tokens include the model's end-of-text tokens. vLLM therefore has to ignore those that it finds itself.
    """
    sampling = request.sampling
    return {
        "max_tokens": _remaining_tokens(request, model),
        "seed": sampling.seed % 2**63,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": model.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.logprobs,
        "stop_token_ids": sorted(stop_tokens(sampling, model)),
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": {GENERATED_TOKENS: len(request.generated)} if request.generated else None,
    }


def generated_tokens(
    tokens: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, top: int | None
) -> tuple[GeneratedToken, ...]:
    """New tokens as vLLM returns them.

    Args:
        tokens: their ids.
        logprobs: for each of them vLLM's `Logprob` by token id: that of the token, and those of the likeliest tokens.
        top: number of likeliest tokens that the request asks for; None: no log probabilities.
    """
    if top is None or logprobs is None:
        return tuple(GeneratedToken(token) for token in tokens)
    return tuple(_with_logprobs(token, found, top) for token, found in zip(tokens, logprobs, strict=True))


def _with_logprobs(token: int, found: Mapping[int, Any], top: int) -> GeneratedToken:
    likeliest = sorted((entry.rank, other) for other, entry in found.items() if entry.rank <= top)
    pairs = tuple(TokenLogprob(other, found[other].logprob) for _, other in likeliest)
    return GeneratedToken(token, found[token].logprob, pairs[:top])


def _remaining_tokens(request: GenerationRequest, model: VllmModel) -> int:
    limit = min(request.sampling.max_tokens, model.max_sequence_length - len(request.prompt))
    return limit - len(request.generated)


def _check_sampling(sampling: SamplingParams) -> None:
    # vLLM starts a grammar after the prompt, and knows nothing of tokens that an earlier replica has generated.
    if sampling.tool_calls:
        raise UnsupportedToolChoiceError(
            "this service runs on vLLM, with which spotune does not enforce calls of tools yet. Use tool_choice: auto, "
            "or serve the model with the engine transformers"
        )
    if sampling.json_schema:
        raise UnsupportedFormatError(
            "this service runs on vLLM, with which spotune does not enforce JSON schemas yet. Serve the model with "
            "the engine transformers, or describe the format in the prompt"
        )
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(sampling, name)
        if not lowest <= value <= highest or (name == "top_p" and value == 0):
            raise ValueError(f"{name}: {value} is outside the range that vLLM supports, {lowest} to {highest}")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise ValueError(f"logprobs: {sampling.logprobs} is outside the range that vLLM supports, 0 to {MAX_LOGPROBS}")
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        raise ValueError(f"logit_bias: it has {len(sampling.logit_bias)} tokens; vLLM supports {MAX_BIASED_TOKENS}")
