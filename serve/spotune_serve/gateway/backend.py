"""What the gateway needs of the replicas behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from spotune_serve.engine.base import GenerationRequest, TokenChunk


@dataclass(frozen=True)
class Replicas:
    """The replicas of all versions, as Ray Serve's controller knows them.

    Attributes:
        states: Number of replicas by Ray Serve application and state, such as RUNNING or STARTING.
        addresses: IP addresses of the pods that have a replica, whatever its state.
        unplaced_seconds: For how long the replica that waits longest for a pod has done so; 0: all have one.
    """

    states: Mapping[str, Mapping[str, int]]
    addresses: frozenset[str] = frozenset()
    unplaced_seconds: float = 0.0


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
