"""An engine on vLLM: paged attention, prefix cache, CUDA graphs, tensor parallelism and LoRA adapters per request.

vLLM is no dependency of spotune: 0.24 pins torch 2.11, and the trainer needs a newer one. Install vllm==0.24.0 where
replicas run on GPUs, in an environment or image of its own. It is imported only when an engine starts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from spotune.errors import JobError
from spotune_serve.engine.adapters.shapes import check_adapter_shapes
from spotune_serve.engine.base import (
    EngineLostError,
    EngineStats,
    FinishReason,
    GenerationError,
    GenerationRequest,
    TokenChunk,
)
from spotune_serve.engine.generation_settings import APPLIED, REFUSED
from spotune_serve.engine.model import default_architecture, task_of
from spotune_serve.engine.vllm_parameters import (
    ADAPTER_RANKS,
    VllmModel,
    VllmSettings,
    check_request,
    engine_arguments,
    finish_reason,
    generated_tokens,
    sampling_arguments,
)
from spotune_serve.engine.vllm_worker import FRONTEND_VARIABLE

_log = logging.getLogger(__name__)

_TESTED_VERSION = "0.24.0"
_FINISH_REASONS: Mapping[str | None, FinishReason] = {"stop": "stop", "length": "length"}
_MEMORY_FIX = (
    "If the GPU's memory does not suffice for weights and key/value cache: use a GPU with more memory, set gpus to a "
    "larger number, which splits the model, or start fewer replicas on a GPU (--replicas)."
)
_IGNORED_SETTINGS = frozenset({"repetition_penalty", "renormalize_logits"})
"""Settings of `generation_config.json` that vLLM applies, or that change no token."""


@dataclass
class _Sequence:
    """A sequence in vLLM.

    Attributes:
        length: tokens of the prompt and new ones.
        started: whether vLLM has generated a token.
    """

    length: int
    started: bool = False


class VllmEngine:
    """Generates tokens for many sequences at once, see `spotune_serve.engine.base.Engine`.

    Use `start_vllm` to create one.

    Args:
        llm: vLLM's `AsyncLLM`; belongs to the engine from now on.
        model: what the model can do.
        adapters: vLLM's `LoRARequest` by name of the adapter.
    """

    def __init__(self, llm: Any, model: VllmModel, adapters: Mapping[str, Any]) -> None:
        self._llm = llm
        self._model = model
        self._adapters = adapters
        self._loaded: set[str] = set()
        self._loading = asyncio.Lock()
        self._sequences: dict[str, _Sequence] = {}
        self._numbers = itertools.count()
        self._closed = False

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens of a sequence."""
        return self._model.max_sequence_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The new tokens of a sequence, as they are generated. Closing the iterator aborts the sequence.

        Temperatures between 0 and 0.01 count as 0.01.

        Raises:
            PromptTooLongError: the sequence has no space for a new token.
            UnknownAdapterError: the adapter is not loaded.
            UnsupportedFormatError: the answer has a JSON schema, or must call a tool.
            ValueError: the prompt is empty, a token id is outside the vocabulary, or a sampling parameter is outside
                what vLLM supports.
            GenerationError: the sequence could not be continued.
            EngineLostError: vLLM's process has ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.check_health()
        check_request(request, self._model)
        reason = finish_reason(request, self._model)
        if reason is not None:
            yield TokenChunk((), reason)
            return
        name = f"{request.request_id}-{next(self._numbers)}"
        sequence = self._sequences[name] = _Sequence(len(request.prompt) + len(request.generated))
        last: TokenChunk | None = None
        try:
            async with aclosing(await self._outputs(request, name)) as outputs:
                async for output in outputs:
                    chunk = _chunk(output, request)
                    sequence.started = True
                    sequence.length += len(chunk.tokens)
                    if not output.finished:
                        yield chunk
                    elif chunk.finish_reason is not None:
                        last = chunk
        except EngineDeadError as error:
            raise EngineLostError(_failure(request, sequence, str(error.__cause__ or error))) from error
        except EngineGenerateError as error:
            raise GenerationError(_failure(request, sequence, str(error.__cause__ or error))) from error
        finally:
            del self._sequences[name]
        if last is None:
            cause = "the engine was closed" if self._closed else "vLLM aborted it"
            raise GenerationError(_failure(request, sequence, cause))
        yield last  # after vLLM's iterator has ended: left earlier, it would abort a sequence that is finished

    def stats(self) -> EngineStats:
        """The current load. A sequence runs from its first token on; prefixes that sequences share count for each."""
        running = [sequence.length for sequence in self._sequences.values() if sequence.started]
        return EngineStats(len(running), len(self._sequences) - len(running), sum(running))

    def check_health(self) -> None:
        """Raise GenerationError if the engine is closed, and EngineLostError if vLLM's process has ended."""
        if self._closed:
            raise GenerationError("the engine is closed")
        if self._llm.errored:
            raise EngineLostError("vLLM's engine process has ended; its log has the reason")

    async def close(self) -> None:
        """Abort all sequences and free the model."""
        self._closed = True
        if not self._llm.errored:
            await self._llm.abort(list(self._sequences))
        self._llm.shutdown()

    async def _outputs(self, request: GenerationRequest, name: str) -> AsyncGenerator[Any, None]:
        """The outputs of vLLM for a request, each with new tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        adapter = await self._adapter(request.adapter)
        sampling = SamplingParams(
            **sampling_arguments(request, self._model), output_kind=RequestOutputKind.DELTA, skip_clone=True
        )
        prompt = {"type": "token", "prompt_token_ids": [*request.prompt, *request.generated]}
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, sampling, name, lora_request=adapter)
        return outputs

    async def _adapter(self, name: str) -> Any:
        """The `LoRARequest` of an adapter, which is loaded before its first sequence; None for the base model.

        An adapter that vLLM has to load in the middle of a step, and cannot, would end the whole engine.
        """
        if not name:
            return None
        if name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:
                    await self._load_adapter(name)
        return self._adapters[name]

    async def _load_adapter(self, name: str) -> None:
        try:
            await self._llm.add_lora(self._adapters[name])
        except Exception as error:
            self.check_health()
            raise GenerationError(f"vLLM cannot load the adapter {name!r}: {error}") from error
        self._loaded.add(name)


def obstacle(directory: Path, gpus: float) -> str:
    """Why vLLM cannot serve a model; empty if it can.

    Args:
        directory: export directory, or any transformers model.
        gpus: GPUs of the replica.
    """
    if gpus <= 0:
        return "vLLM needs a GPU"
    if find_spec("vllm") is None:
        return f"vLLM is not installed. Install vllm=={_TESTED_VERSION} in an environment of its own"
    if not (directory / "config.json").is_file():
        return f"{directory} has no config.json"
    try:
        config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        settings = _generation_config(directory, config)
    except (OSError, ValueError, KeyError) as error:
        return f"the configuration of {directory} cannot be read: {error}"
    architecture = (config.architectures or [default_architecture(config)])[0]
    if task_of(architecture) != "causal":
        return f"vLLM has no encoder-decoder models, and {architecture} is not a causal language model"
    for name, neutral in {**APPLIED, **REFUSED}.items():
        value = getattr(settings, name, None)
        if name not in _IGNORED_SETTINGS and value not in neutral:
            return f"generation_config.json of {directory} has {name}: {value!r}, which vLLM does not support"
    return ""


def start_vllm(directory: Path, adapters: Mapping[str, Path], settings: VllmSettings, gpus: float = 1.0) -> VllmEngine:
    """Load a model into vLLM, which runs in a process of its own.

    Args:
        directory: export directory, or any transformers model, with safetensors. float32 weights are computed in
            bfloat16.
        adapters: folders of LoRA adapters that peft saved, by name.
        settings: how vLLM runs.
        gpus: GPUs of the replica.

    Raises:
        JobError: vLLM cannot serve the model or an adapter, or an adapter is for another model.
    """
    reason = obstacle(directory, gpus)
    if reason:
        raise JobError(f"the engine vllm cannot be used: {reason}. Serve the model with the engine transformers.")
    ranks = {name: _adapter_rank(name, folder) for name, folder in adapters.items()}
    check_adapter_shapes(directory, adapters)
    _set_environment(settings)
    from vllm import AsyncEngineArgs, __version__
    from vllm.lora.request import LoRARequest
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if __version__ != _TESTED_VERSION:
        _log.warning("vLLM %s: continued answers were tested with vLLM %s only", __version__, _TESTED_VERSION)
    try:
        arguments = AsyncEngineArgs(**engine_arguments(directory, settings, ranks))
        llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise JobError(
            f"vLLM cannot load {directory}: {error}. The log has vLLM's own messages. {_MEMORY_FIX}"
        ) from error
    requests = {name: LoRARequest(name, number, str(adapters[name])) for number, name in enumerate(ranks, start=1)}
    return VllmEngine(llm, _describe(llm, directory, frozenset(ranks)), requests)


def _set_environment(settings: VllmSettings) -> None:
    """Set what vLLM reads from the environment, in this process and in those that it starts.

    The model runner V2 is the one whose random numbers depend on seed and position. FlashInfer's sampler takes no
    seeds, and every request has one.
    """
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_BATCH_INVARIANT": str(int(settings.batch_invariant)),
    }
    if "vllm" in sys.modules:
        changed = [name for name, value in variables.items() if os.environ.get(name) != value]
        if changed:
            raise JobError(f"vLLM was imported before with another {changed[0]}: start the engine in a new process.")
    os.environ.update(variables)
    os.environ[FRONTEND_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _describe(llm: Any, directory: Path, adapters: frozenset[str]) -> VllmModel:
    """The limits of a loaded model, and what its generation configuration demands."""
    settings = _generation_config(directory, llm.model_config.hf_config)
    eos = settings.eos_token_id
    return VllmModel(
        vocabulary=int(llm.model_config.get_vocab_size()),
        max_sequence_length=int(llm.model_config.max_model_len),
        eos_token_ids=frozenset(() if eos is None else eos if isinstance(eos, list) else [eos]),
        repetition_penalty=float(settings.repetition_penalty or 1.0),
        adapters=adapters,
    )


def _generation_config(directory: Path, config: Any) -> Any:
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    return GenerationConfig.from_model_config(config)


def _adapter_rank(name: str, directory: Path) -> int:
    """The rank of a LoRA adapter.

    Raises:
        JobError: the folder has no LoRA adapter that vLLM supports.
    """
    place = f"adapter {name!r} in {directory}"
    if not (directory / "adapter_model.safetensors").is_file():
        raise JobError(
            f"{place} has no adapter_model.safetensors. Name a folder that peft's save_pretrained has written."
        )
    try:
        config: dict[str, Any] = dict(json.loads((directory / "adapter_config.json").read_text(encoding="utf-8")))
        rank = int(config["r"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobError(f"{place}: adapter_config.json is missing or damaged: {error}. Export it again.") from error
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise JobError(f"{place}: only LoRA adapters with bias: none can be served beside their base model.")
    for field in ("rank_pattern", "alpha_pattern", "modules_to_save", "use_dora"):
        if config.get(field):
            raise JobError(f"{place} has {field}, which vLLM does not support. Merge it, or use --engine transformers.")
    if rank > ADAPTER_RANKS[-1]:
        raise JobError(f"{place} has rank {rank}; vLLM supports {ADAPTER_RANKS[-1]}. Use --engine transformers.")
    return rank


def _chunk(output: Any, request: GenerationRequest) -> TokenChunk:
    """The new tokens of vLLM's `RequestOutput`; none if it reports that the sequence was aborted."""
    completion = output.outputs[0]
    reason = _FINISH_REASONS.get(completion.finish_reason)
    if output.finished and reason is None:
        return TokenChunk(())
    return TokenChunk(generated_tokens(completion.token_ids, completion.logprobs, request.sampling.logprobs), reason)


def _failure(request: GenerationRequest, sequence: _Sequence, reason: str) -> str:
    count = sequence.length - len(request.prompt)
    return f"request {request.request_id} failed after {count} tokens: {reason}"
