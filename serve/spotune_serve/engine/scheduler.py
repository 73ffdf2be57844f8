"""Which sequences run: continuous batching, one step at a time, in one thread.

A step admits at most one waiting sequence and then generates one token for every running one. Waiting sequences are
admitted first come, first served.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from spotune_serve.engine.base import EngineLostError, EngineStats, GenerationError
from spotune_serve.engine.decoding_batch import DecodingBatch, Sequence
from spotune_serve.engine.model import LoadedModel

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs sequences within the limits.

    Args:
        model: generates the tokens.
        max_batch_size: maximum number of running sequences.
        max_cached_tokens: maximum size of all caches, in tokens. A sequence reserves its maximum length when it is
            admitted, so it never has to leave before its last token.
        check_weights: raises EngineLostError if the weights may have changed; called after each forward pass, before
            its tokens are delivered.

    Attributes:
        device_error: the error after which the device computes nothing more; empty if there was none.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_batch_size: int,
        max_cached_tokens: int,
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._check_weights = check_weights
        self._max_batch_size = max_batch_size
        self._max_cached_tokens = max_cached_tokens
        self._waiting: deque[Sequence] = deque()
        self._batches: list[DecodingBatch] = []
        self.device_error = ""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._batches)

    def stats(self) -> EngineStats:
        """The load after the last step."""
        return EngineStats(
            running=sum(len(batch.sequences) for batch in self._batches),
            waiting=len(self._waiting),
            cached_tokens=sum(batch.cached_tokens for batch in self._batches),
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def step(self) -> None:
        """Drop aborted sequences, admit at most one, and generate one token for each running sequence.

        An exception ends the sequences concerned: that of a prefill its sequence, that of a batch the whole batch.
        """
        self._drop_aborted()
        self._admit_one()
        for batch in list(self._batches):
            try:
                self._keep(batch, _extend_all(batch.sequences, batch.decode(), self._check_weights))
            except Exception as error:  # noqa: BLE001 - delivered to the consumers
                self._fail_batch(batch, error)

    def fail_all(self, reason: str) -> None:
        """End all sequences with an error."""
        sequences = [*self._waiting, *(sequence for batch in self._batches for sequence in batch.sequences)]
        self._waiting.clear()
        self._batches = []
        _deliver_error(sequences, reason)

    def _drop_aborted(self) -> None:
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.aborted)
        for batch in list(self._batches):
            self._keep(batch, [sequence for sequence in batch.sequences if not sequence.aborted])

    def _admit_one(self) -> None:
        if not self._waiting or sum(len(batch.sequences) for batch in self._batches) >= self._max_batch_size:
            return
        batch = self._place(self._waiting[0])
        if batch is None:
            return
        sequence = self._waiting.popleft()
        try:
            self._model.activate(batch.adapter)
            logits, caches = self._model.prefill(sequence.request.prompt, sequence.decoder_ids)
            going_on = _extend_all([sequence], logits, self._check_weights)
        except Exception as error:  # noqa: BLE001 - delivered to the consumer
            self._fail([sequence], error)
            return
        if not going_on:
            return
        if batch not in self._batches:
            self._batches.append(batch)
        try:
            batch.add(sequence, caches)
        except Exception as error:  # noqa: BLE001 - delivered to the consumers
            self._fail_batch(batch, error)

    def _keep(self, batch: DecodingBatch, sequences: Items[Sequence]) -> None:
        batch.keep(sequences)
        if not batch.sequences:
            self._batches.remove(batch)

    def _fail_batch(self, batch: DecodingBatch, error: Exception) -> None:
        self._batches.remove(batch)
        self._fail(batch.sequences, error)

    def _fail(self, sequences: Items[Sequence], error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError):
            self.device_error = str(error)
        _fail(sequences, error)

    def _place(self, sequence: Sequence) -> DecodingBatch | None:
        """The batch that the sequence can join; a new one if the padding of the others would take too much memory.

        None: it has to wait for memory.
        """
        reserved = sum(batch.reserved_tokens() for batch in self._batches)
        for batch in self._batches:
            more = batch.reserved_tokens(sequence) - batch.reserved_tokens()
            if batch.accepts(sequence) and reserved + more <= self._max_cached_tokens:
                return batch
        new = DecodingBatch(self._model, sequence.request.adapter)
        return new if reserved + new.reserved_tokens(sequence) <= self._max_cached_tokens else None


def _extend_all(sequences: Items[Sequence], logits: Tensor, check_weights: Callable[[], None]) -> list[Sequence]:
    """Extend sequences by one token each and deliver it; returns those that go on.

    Args:
        sequences: in the order of the rows.
        logits: fp32 [batch, vocabulary].
        check_weights: raises if the logits may be wrong.
    """
    largest, likeliest = (column.tolist() for column in logits.max(dim=-1))
    check_weights()  # now that the device has computed the logits
    going_on = []
    for row, sequence in enumerate(sequences):
        try:
            if math.isnan(largest[row]):
                raise ValueError("the model's logits are not numbers (NaN)")
            chunk = sequence.extend(logits[row], likeliest[row])
        except Exception as error:  # noqa: BLE001 - delivered to the consumer
            _fail([sequence], error)
            continue
        sequence.deliver(chunk)
        if chunk.finish_reason is None:
            going_on.append(sequence)
    return going_on


def _fail(sequences: Items[Sequence], error: Exception) -> None:
    _log.error("%d sequences failed", len(sequences), exc_info=error)
    error.__traceback__ = None  # its frames hold tensors, perhaps those that filled the memory
    _deliver_error(sequences, f"{type(error).__name__}: {error}", error)


def _deliver_error(sequences: Items[Sequence], reason: str, cause: Exception | None = None) -> None:
    for sequence in sequences:
        name, count = sequence.request.request_id, len(sequence.generated)
        kind = EngineLostError if isinstance(cause, EngineLostError) else GenerationError
        failure = kind(f"request {name} failed after {count} tokens: {reason}")
        failure.__cause__ = cause
        sequence.deliver(failure)
