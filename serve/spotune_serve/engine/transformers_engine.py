"""An engine on plain transformers: continuous batching in one background thread, on any device."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable

import torch

from spotune_serve.engine.base import (
    EngineStats,
    GenerationError,
    GenerationRequest,
    PromptTooLongError,
    TokenChunk,
    UnsupportedFormatError,
    check_names_and_tokens,
)
from spotune_serve.engine.decoding_batch import Sequence
from spotune_serve.engine.grammar import AnswerGrammar, Grammars
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 256
"""As vLLM. What limits memory is the size of the caches."""
DEFAULT_MAX_CACHED_TOKENS = 65_536


class TransformersEngine:
    """Generates tokens for many sequences at once, see `spotune_serve.engine.base.Engine`.

    Args:
        model: belongs to the engine from now on.
        max_batch_size: maximum number of sequences that decode at once; others wait.
        max_cached_tokens: maximum size of the key/value caches in tokens, padding included.
        grammars: makes the grammars of answers with a JSON schema; None: such requests are refused.
        check_weights: raises EngineLostError if the weights may have changed, because another process that owns their
            memory has ended.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        max_cached_tokens: int = DEFAULT_MAX_CACHED_TOKENS,
        grammars: Grammars | None = None,
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._max_sequence_length = min(model.max_positions or max_cached_tokens, max_cached_tokens)
        self._max_cached_tokens = max_cached_tokens
        self._scheduler = Scheduler(model, max_batch_size, max_cached_tokens, check_weights)
        self._check_weights = check_weights
        self._condition = threading.Condition()
        self._submitted: list[Sequence] = []
        self._stats = self._scheduler.stats()
        self._device_error = ""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens of a sequence; for encoder-decoder models, of the decoder's sequence."""
        return self._max_sequence_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The new tokens of a sequence, as they are generated. Closing the iterator aborts the sequence.

        Raises:
            PromptTooLongError: the sequence has no space for a new token.
            UnknownAdapterError: the adapter is not loaded.
            UnsupportedFormatError: the answer's JSON schema, or the call of a tool, cannot be enforced.
            ValueError: the prompt is empty, or a token id is outside the vocabulary.
            GenerationError: the sequence could not be continued.
            EngineLostError: the weights are lost.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TokenChunk | GenerationError] = asyncio.Queue()

        def deliver(item: TokenChunk | GenerationError) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the consumer's event loop is closed
                sequence.aborted = True

        with self._condition:
            self.check_health()
            sequence = self._sequence(self._model, request, deliver)
            settings, vocabulary = self._model.settings, self._model.vocabulary
        if request.sampling.has_grammar:
            sequence.grammar = await self._grammar(request, vocabulary, settings.eos_token_ids)
        if sequence.finish_reason is not None:
            yield TokenChunk((), sequence.finish_reason)
            return
        self._submit(sequence)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, GenerationError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            sequence.aborted = True

    def stats(self) -> EngineStats:
        """The current load."""
        with self._condition:
            waiting = self._stats.waiting + len(self._submitted)
            return EngineStats(self._stats.running, waiting, self._stats.cached_tokens)

    def check_health(self) -> None:
        """Raise GenerationError if the engine cannot generate any more: closed, or its device or weights are lost."""
        if self._closed or not self._thread.is_alive():
            raise GenerationError("the engine is closed" if self._closed else "the engine's thread has ended")
        if self._device_error:
            raise GenerationError(f"the device has failed: {self._device_error}")
        self._check_weights()

    async def close(self) -> None:
        """Abort all sequences and free the model."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def _sequence(
        self, model: LoadedModel, request: GenerationRequest, deliver: Callable[[TokenChunk | GenerationError], None]
    ) -> Sequence:
        _check_request(model, request)
        settings, sampling = model.settings, request.sampling
        start = settings.decoder_start or request.prompt
        encoder_length = len(request.prompt) if model.seq2seq else 0
        space = min(self._max_sequence_length, self._max_cached_tokens - encoder_length) - len(start)
        if space < max(1, len(request.generated)):
            raise PromptTooLongError(
                f"the prompt has {len(request.prompt)} tokens and {len(request.generated)} were generated, which "
                f"leaves no space for a new one: the maximum is {self._max_sequence_length} for a sequence and "
                f"{self._max_cached_tokens} for all that is cached."
            )
        limit = min(sampling.max_tokens, space)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else settings.eos_token_ids)}
        processors = settings.logits_processors(request.prompt, limit, model.device)
        return Sequence(request, limit, start, encoder_length, frozenset(stops), processors, deliver)

    async def _grammar(self, request: GenerationRequest, vocabulary: int, eos_tokens: frozenset[int]) -> AnswerGrammar:
        if self._grammars is None:
            raise UnsupportedFormatError("this engine has no tokenizer, which a JSON schema needs")
        sampling = request.sampling
        return await asyncio.to_thread(self._grammars.start, sampling, request.generated, vocabulary, eos_tokens)

    def _submit(self, sequence: Sequence) -> None:
        with self._condition:
            self.check_health()
            self._submitted.append(sequence)
            self._condition.notify()

    def _run(self) -> None:
        """Run steps until the engine is closed."""
        with torch.inference_mode():
            while self._take_submitted():
                try:
                    self._scheduler.step()
                except Exception as error:  # noqa: BLE001 - delivered to the consumers
                    _log.exception("a step failed")
                    self._scheduler.fail_all(f"{type(error).__name__}: {error}")
                with self._condition:
                    self._stats = self._scheduler.stats()
                    self._device_error = self._scheduler.device_error
        self._scheduler.fail_all("the engine was closed")
        with self._condition:
            self._stats = self._scheduler.stats()
            del self._model, self._scheduler

    def _take_submitted(self) -> bool:
        """Wait for work and pass new sequences to the scheduler; False once the engine is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._submitted or self._scheduler.has_work)
            for sequence in self._submitted:
                self._scheduler.submit(sequence)
            self._submitted.clear()
            self._stats = self._scheduler.stats()
            return not self._closed


def _check_request(model: LoadedModel, request: GenerationRequest) -> None:
    check_names_and_tokens(request, model.adapters, model.vocabulary)
    encoder_positions = model.max_positions if model.seq2seq else None
    if encoder_positions is not None and len(request.prompt) > encoder_positions:
        raise PromptTooLongError(
            f"the prompt has {len(request.prompt)} tokens; the model's encoder reads {encoder_positions}"
        )
