"""Whether the claims that jobs and services name exist. The caches have only claims that the operator made.

A pod with a node shows that its claims exist, because the scheduler waits for them. So the API server is asked once
before there are such pods, and never about a job or service that runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import CLAIMS, Manifest, Resource

logger = logging.getLogger(__name__)

SECOND_LOOKUP_SECONDS = 15.0
"""Time from the first lookup of a missing claim to the second. Job and claim may be applied at once, the claim second,
so a job that is younger does not need a person yet.
"""


class Server(Protocol):
    """The one request that the lookups need."""

    async def find(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """An object; None if there is none of this name."""


class Owner(Protocol):
    """A job or service in a cache."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def generation(self) -> int:
        """Its ``metadata.generation``."""


@dataclass(frozen=True)
class _Answer:
    """What the API server said about the claims of a job or service.

    Attributes:
        owner: Its uid and generation.
        missing: Names of the claims that do not exist; None: a request failed.
        at: Unix time of the requests.
        is_first: Whether no earlier lookup was for the same spec.
    """

    owner: tuple[str, int]
    missing: Sequence[str] | None
    at: float
    is_first: bool


class ExistingClaims:
    """Looks up claims.

    Args:
        server: The API server.
        ask_again_seconds: Time between two lookups, after the second, while a claim is missing or could not be looked
            up.
        clock: Returns Unix time.
    """

    def __init__(self, server: Server, ask_again_seconds: float, clock: Callable[[], float]) -> None:
        self._server = server
        self._ask_again_seconds = ask_again_seconds
        self._clock = clock
        self._answers: dict[tuple[str, str], _Answer] = {}

    async def missing(self, owner: Owner, names: Callable[[], Sequence[str]], *, exist: bool) -> Sequence[str] | None:
        """Names of the claims that do not exist; None: not known.

        Args:
            owner: The job or service.
            names: Returns the names of its claims; called only for a lookup.
            exist: Whether the claims are known to exist, because its pods are on nodes, or do not matter any more.
        """
        if exist:
            self.forget(owner.key)  # a claim may be deleted before it is needed again
            return ()
        identity, answer = (owner.uid, owner.generation), self._answers.get(owner.key)
        if answer is not None and answer.owner != identity:
            answer = None  # other claims may be named now, or the job was resumed
        if answer is None or self._is_due(answer):
            known = answer.missing if answer is not None else None
            missing = await self._ask(owner.key[0], names(), known)
            answer = _Answer(identity, missing, self._clock(), is_first=answer is None)
            self._answers[owner.key] = answer
        return answer.missing

    def forget(self, key: tuple[str, str]) -> None:
        """Forget what is known about a job or service."""
        self._answers.pop(key, None)

    def _is_due(self, answer: _Answer) -> bool:
        is_settled = answer.missing is not None and not answer.missing
        wait = min(SECOND_LOOKUP_SECONDS, self._ask_again_seconds) if answer.is_first else self._ask_again_seconds
        return not is_settled and self._clock() - answer.at >= wait

    async def _ask(self, namespace: str, names: Sequence[str], known: Sequence[str] | None) -> Sequence[str] | None:
        """The missing ones of these claims; after an error what was known before."""
        try:
            return tuple([name for name in names if await self._server.find(CLAIMS, namespace, name) is None])
        except KubernetesError as error:
            logger.warning("cannot look up the claims %s, and continue without: %s", ", ".join(names), error)
            return known
