"""What the gateway needs of the replicas behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from spotune_serve.engine.base import GenerationRequest, TokenChunk

StatesByApplication = Mapping[str, Mapping[str, int]]
"""Number of replicas by Ray Serve application and state, such as RUNNING or STARTING."""


class ReplicaLostError(Exception):
    """The replica died or leaves. The request continues on another one."""


class NoReplicaError(Exception):
    """No replica is ready in time."""


class VersionGoneError(NoReplicaError):
    """The version's replicas have been removed for good. A request without a token may go to another version."""


class Backend(Protocol):
    """Replicas that generate tokens, each of them an `Engine`."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """The new tokens of a sequence. Closing the iterator aborts the sequence.

        Raises:
            ReplicaLostError: at any point: the replica was lost.
            NoReplicaError: no replica takes the request.
            VersionGoneError: nor will one ever.
            PromptTooLongError: the sequence has no space for a new token.
            UnknownAdapterError: the adapter is not loaded.
        """

    async def is_ready(self) -> bool:
        """Whether a replica answers requests."""
