"""A replica: one engine in one Ray actor."""

from __future__ import annotations

from collections.abc import AsyncIterator

from spotune_serve.deployment.config import ServiceConfig
from spotune_serve.engine.base import EngineStats, GenerationRequest, TokenChunk


class Replica:
    """Hosts an engine. Ray Serve starts, watches and drains it.

    Raises:
        JobError: the model cannot be loaded.
    """

    def __init__(self, config: ServiceConfig) -> None:
        import torch

        from spotune_serve.engine.load import load_adapters, load_model
        from spotune_serve.engine.transformers_engine import TransformersEngine

        if config.threads:
            torch.set_num_threads(config.threads)
        model = load_model(config.directory, "cuda" if config.gpus else "cpu")
        self._engine = TransformersEngine(load_adapters(model, config.adapters), max_batch_size=config.max_batch_size)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """The new tokens of a sequence, see `Engine.generate`. Cancelling the call aborts the sequence."""
        async for chunk in self._engine.generate(request):
            yield chunk

    async def stats(self) -> EngineStats:
        """The engine's load."""
        return self._engine.stats()

    def check_health(self) -> None:
        """Raise if the engine cannot generate any more; Ray Serve then replaces the replica."""
        self._engine.check_health()
