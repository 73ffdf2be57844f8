"""A replica: one engine in one Ray actor."""

from __future__ import annotations

import logging
import math
import os
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from spotune.errors import JobError
from spotune_serve.deployment.config import ModelConfig
from spotune_serve.deployment.exports import load_version
from spotune_serve.deployment.token_transport.messages import Destination
from spotune_serve.deployment.token_transport.sender import TokenSender
from spotune_serve.engine.base import Engine, EngineStats, GenerationRequest

logger = logging.getLogger(__name__)

_CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Limits of this container."""


class Replica:
    """Hosts an engine. Ray Serve starts, watches and drains it.

    With a part of a GPU, the engine on transformers shares one copy of the weights with the other replicas there, and
    sleeps while it waits for the GPU.

    A drain of the Ray node (`ray drain-node`, a spot notice) takes these steps in Ray Serve 2.60:

    1. The controller starts a replacement on another node. This replica gets new requests only if there is no replica
       on a node that stays (`LeastRequestRouter`).
    2. When the replacement runs, or `drain_seconds` before the deadline of the drain, it stops this replica. From then
       on, no new request arrives. Running sequences have `drain_seconds` to finish.
    3. Ray Serve kills the process after the last sequence, or when that time is over. Sequences that still run then
       continue at another replica, because the gateway holds their tokens.

    If the node leaves without a drain, its sequences continue at another replica, too.

    Raises:
        JobError: the model cannot be loaded.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._engine: Engine = load_version(config.directory, config.step, lambda folder: start_engine(folder, config))
        self._sender = TokenSender()

    async def generate(self, request: GenerationRequest, destination: Destination) -> None:
        """Send the new tokens of a sequence to its gateway. Cancelling the call aborts the sequence.

        Raises:
            GatewayLostError: the gateway cannot be reached, or has closed the connection.
            Exception: see `Engine.generate`.
        """
        sender = await self._sender.open(destination)
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                sender.send(chunk)

    async def stats(self) -> EngineStats:
        """The engine's load."""
        return self._engine.stats()

    def check_health(self) -> None:
        """Raise if the engine cannot generate any more; Ray Serve then replaces the replica."""
        self._engine.check_health()


def start_engine(folder: Path, config: ModelConfig) -> Engine:
    """The engine of a replica, with the model in a folder.

    Raises:
        JobError: the model cannot be loaded.
    """
    from spotune_serve.engine.vllm_engine import start_vllm
    from spotune_serve.engine.vllm_parameters import VllmSettings
    from spotune_serve.engine.weights.gpu_memory import memory_errors

    if uses_vllm(folder, config):
        settings = replace(
            VllmSettings.for_gpus(config.gpus, config.max_batch_size), batch_invariant=config.batch_invariant
        )
        return start_vllm(folder, config.adapters, settings, config.gpus)
    with memory_errors(folder):
        return _start_transformers(folder, config)


def _start_transformers(folder: Path, config: ModelConfig) -> Engine:
    import torch

    from spotune_serve.engine.gpu_waits import sleep_during_gpu_waits
    from spotune_serve.engine.grammar import Grammars
    from spotune_serve.engine.transformers_engine import (
        DEFAULT_MAX_BATCH_SIZE,
        DEFAULT_MAX_CACHED_TOKENS,
        TransformersEngine,
    )
    from spotune_serve.engine.weights.gpu_memory import cached_tokens_limit
    from spotune_serve.engine.weights.load import load_adapters, load_model
    from spotune_serve.engine.weights.shared import share_or_copy_weights

    torch.set_num_threads(config.threads or available_processors())
    batch_size, grammars = config.max_batch_size or DEFAULT_MAX_BATCH_SIZE, Grammars.of(folder)
    if config.gpus == 0:
        loaded = load_adapters(load_model(folder), config.adapters)
        return TransformersEngine(loaded, batch_size, grammars=grammars)
    if config.gpus >= 1:
        loaded = load_adapters(load_model(folder, "cuda"), config.adapters)
        tokens = cached_tokens_limit(loaded, folder, DEFAULT_MAX_CACHED_TOKENS)
        return TransformersEngine(loaded, batch_size, tokens, grammars)
    sleep_during_gpu_waits()
    model = load_model(folder)
    check = share_or_copy_weights(model, folder, torch.device("cuda", torch.cuda.current_device()))
    loaded = load_adapters(model, config.adapters)
    tokens = cached_tokens_limit(loaded, folder, DEFAULT_MAX_CACHED_TOKENS, share=config.gpus)
    return TransformersEngine(loaded, batch_size, tokens, grammars, check)


def uses_vllm(folder: Path, config: ModelConfig) -> bool:
    """Whether the engine of a replica is vLLM. On a GPU, the log says why it is not.

    Raises:
        JobError: only vLLM has the batch-invariant kernels that were asked for, and it cannot be used.
    """
    from spotune_serve.engine.vllm_engine import obstacle

    if config.engine == "vllm":
        return True
    reason = obstacle(folder, config.gpus) if config.engine == "auto" else "the engine is transformers"
    if reason and config.batch_invariant:
        raise JobError(f"batch-invariant kernels need the engine vllm: {reason}. Serve the model without them.")
    if config.engine == "transformers":
        return False
    if reason and config.gpus > 0:
        logger.warning("the engine is transformers, which is slower on a GPU than vLLM: %s", reason)
    return not reason


def available_processors(control_group: Path = _CONTROL_GROUP) -> int:
    """The number of processors that this container may use, rounded up.

    It is the CPU limit of the container. Without a limit, it is the number of processors that the process may run on.

    Args:
        control_group: folder of the container's control group (version 2).
    """
    processors = len(os.sched_getaffinity(0))
    try:
        quota, period = (control_group / "cpu.max").read_text(encoding="ascii").split()
        limit = processors if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # another version of control groups
        return processors
    return max(1, min(processors, limit))
