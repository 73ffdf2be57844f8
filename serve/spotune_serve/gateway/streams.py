"""Token streams that continue on another replica when theirs is lost, without losing or repeating a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotune_serve.engine.base import FinishReason, GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import Backend, NoReplicaError, ReplicaLostError, VersionGoneError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)


async def resumable(
    backend: Backend,
    request: GenerationRequest,
    *,
    timeout_seconds: float,
    retry_seconds: float = 0.1,
    stop_tokens: Set[int] = frozenset(),
    on_resumption: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[TokenChunk, None]:
    """The tokens of a sequence, each once and in order, from as many replicas as it takes.

    After the loss of a replica the same request goes to the next one, with the tokens so far. Its seed and the token's
    position determine each token, so a continued stream equals an undisturbed one.

    Args:
        backend: the replicas.
        request: the sequence; it may have generated tokens already.
        timeout_seconds: time without a new token, counted from the first failure after it, until the request fails.
        retry_seconds: wait before the request is sent again.
        stop_tokens: tokens that end the sequence.
        on_resumption: called each time that the request is sent again.
        clock: monotonic seconds.
        sleep: waits a number of seconds.

    Raises:
        NoReplicaError: no replica took the request, or no replica continued it in time.
        VersionGoneError: no replica is left, nor will there be one.
        PromptTooLongError: the sequence has no space for a new token.
        UnknownAdapterError: the adapter is not loaded.
    """
    patience = _Patience(timeout_seconds, clock)
    generated = list(request.generated)
    while True:
        try:
            async with _closing(backend.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.tokens:
                        patience.renew()
                        generated += [token.token for token in chunk.tokens]
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            raise ReplicaLostError(f"the stream of request {request.request_id} was cut off")
        except (ReplicaLostError, NoReplicaError) as error:
            request = replace(request, generated=tuple(generated))
            patience.check(error, is_new=not generated)
            logger.warning(
                "request %s lost its replica after %d tokens and continues: %s",
                request.request_id, len(generated), error,
            )  # fmt: skip
        missed_reason = _finish_reason(request, stop_tokens)
        if missed_reason is not None:
            yield TokenChunk((), missed_reason)
            return
        await sleep(retry_seconds)
        on_resumption()


class _Patience:
    """How long a sequence waits for a replica without a new token.

    Args:
        seconds: maximum time, counted from the first failure.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._failing_since: float | None = None

    def renew(self) -> None:
        """A token has arrived."""
        self._failing_since = None

    def check(self, error: ReplicaLostError | NoReplicaError, *, is_new: bool) -> None:
        """Return if the sequence is to be sent again after a failure.

        Args:
            error: the failure.
            is_new: whether the sequence has no token yet: its client may try again, or another version may take it.

        Raises:
            NoReplicaError: it is not sent again.
        """
        if isinstance(error, VersionGoneError):
            raise error
        if isinstance(error, NoReplicaError) and is_new and self._failing_since is None:
            raise error
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since >= self._seconds:
            raise NoReplicaError(f"no replica continued the request within {self._seconds:g} s: {error}") from error


def _finish_reason(request: GenerationRequest, stop_tokens: Set[int]) -> FinishReason | None:
    """Why a sequence is finished, if its replica was lost between the last token and the finish reason."""
    if request.generated and request.generated[-1] in stop_tokens:
        return "stop"
    return "length" if len(request.generated) >= request.sampling.max_tokens else None


@asynccontextmanager
async def _closing(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[AsyncIterator[TokenChunk], None]:
    """Close the iterator at once when it is left early, which aborts the sequence on its replica."""
    try:
        yield chunks
    finally:
        close: Any = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
