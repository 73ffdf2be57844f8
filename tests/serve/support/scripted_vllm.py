"""As much of vLLM as the engine uses, without a model: each next token is a function of seed and position."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RequestOutputKind(Enum):
    """vLLM's enum."""

    DELTA = 1


class ScriptedSampling(SimpleNamespace):
    """vLLM's `SamplingParams`: takes any argument."""


class EngineDeadError(Exception):
    """vLLM's process has ended."""


class EngineGenerateError(Exception):
    """vLLM failed in one request."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules importable that the engine imports while it generates."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": ScriptedSampling},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {
            "EngineDeadError": EngineDeadError,
            "EngineGenerateError": EngineGenerateError,
        },
    }
    _install_modules(monkeypatch, names)


def install_start(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the modules importable that the engine imports while it starts, which fails with an error of vLLM."""

    class FailingLlm:
        @classmethod
        def from_engine_args(cls, arguments: Any, usage_context: Any) -> None:
            raise error

    names: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": ScriptedSampling, "AsyncEngineArgs": SimpleNamespace, "__version__": "0.24.0"},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": SimpleNamespace},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FailingLlm},
    }
    _install_modules(monkeypatch, names)


def _install_modules(monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Mapping[str, Any]]) -> None:
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def scripted_token(seed: int, position: int) -> int:
    """The next token of a sequence with `position` tokens."""
    return 3 + (seed * 31 + position * 7) % 90


@dataclass
class ScriptedLlm:
    """vLLM's `AsyncLLM`.

    Attributes:
        max_length: maximum tokens of a sequence.
        error: raised by the next token of each sequence.
        errored: whether the process has ended.
        prompts: prompt of each request.
        samplings: sampling parameters of each request.
        adapters: `lora_request` of each request.
        loaded: adapters that were loaded.
        aborted: names of requests that were aborted by name, or whose iterator was left early.
        gate: closed, requests get no token after their first.
    """

    max_length: int = 64
    error: Exception | None = None
    errored: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Any] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)
    loaded: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    shut_down: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    async def generate(
        self, prompt: Mapping[str, Any], sampling: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """Outputs of one token each."""
        tokens = list(prompt["prompt_token_ids"])
        self.prompts.append(tokens.copy())
        self.samplings.append(sampling)
        self.adapters.append(lora_request)
        finished = False
        try:
            for count in range(1, sampling.max_tokens + 1):
                await asyncio.sleep(0)
                if self.error is not None:
                    raise self.error
                if count > 1:
                    await self.gate.wait()
                if request_id in self.aborted:
                    finished = True
                    yield output([], "abort")
                    return
                token = scripted_token(sampling.seed, len(tokens))
                tokens.append(token)
                reason = "stop" if token in sampling.stop_token_ids else None
                if count == sampling.max_tokens or len(tokens) == self.max_length:
                    reason = reason or "length"
                yield output([token], reason, sampling.logprobs)
                if reason is not None:
                    finished = True
                    return
        finally:
            if not finished:
                self.aborted.append(request_id)

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests by name."""
        self.aborted += request_ids
        self.gate.set()

    async def add_lora(self, adapter: Any) -> bool:
        """Load an adapter."""
        await asyncio.sleep(0)
        if adapter == "damaged":
            raise ValueError("no such tensor")
        self.loaded.append(adapter)
        return True

    def shutdown(self) -> None:
        """End the process."""
        self.shut_down = True


def output(tokens: list[int], reason: str | None, logprobs: int | None = None) -> Any:
    """VLLM's `RequestOutput` with new tokens, whose log probability is -1, and likelier ones before it."""
    found = None
    if logprobs is not None:
        found = [logprobs_of(token, logprobs) for token in tokens]
    completion = SimpleNamespace(token_ids=tokens, logprobs=found, finish_reason=reason)
    return SimpleNamespace(outputs=[completion], finished=reason is not None)


def logprobs_of(token: int, count: int) -> dict[int, Any]:
    """VLLM's log probabilities of one token: first its own, then those of the likeliest."""
    ranked = {other: SimpleNamespace(rank=rank, logprob=-rank / 10) for rank, other in enumerate((1, 2)[:count], 1)}
    return {token: SimpleNamespace(rank=3, logprob=-1.0), **ranked}
