"""A backend with a real engine and random weights, which loses its replica now and then."""

from __future__ import annotations

from collections.abc import AsyncIterator

from spotune_serve.engine.base import GenerationRequest, TokenChunk
from spotune_serve.engine.grammar import Grammars
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.transformers_engine import TransformersEngine
from spotune_serve.gateway.backend import ReplicaLostError
from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.toy_models import toy_model


class EngineBackend:
    """One engine, whose replica is lost after every `lost_after` tokens of a sequence; 0: never."""

    def __init__(self, model: ServedModel, lost_after: int = 0) -> None:
        weights = toy_model("llama", vocab_size=len(model.tokenizer), max_position_embeddings=256)
        self._engine = TransformersEngine(LoadedModel(weights), grammars=Grammars(lambda: model.tokenizer))
        self._lost_after = lost_after
        self.losses = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        count = 0
        async for chunk in self._engine.generate(request):
            yield chunk
            count += 1
            if count == self._lost_after and chunk.finish_reason is None:
                self.losses += 1
                raise ReplicaLostError("the node was taken away")

    async def is_ready(self) -> bool:
        return True
