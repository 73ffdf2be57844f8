"""Whether the claim that a job names in ``spec.storage.existingClaim`` exists.

The caches have only claims that the operator made. A pod with a node shows that its claim exists, because the scheduler
waits for it. So the API server is asked once before a job has such pods, and never about a job that runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from spotune_operator.errors import KubernetesError
from spotune_operator.kube.client import CLAIMS, Manifest, Resource
from spotune_operator.observe.caches import CachedJob
from spotune_operator.observe.state import JobKey, Pod

logger = logging.getLogger(__name__)

_ENDED: Final = ("Complete", "Failed")
"""Phases of jobs that need no claim."""


class Server(Protocol):
    """The one request that the lookups need."""

    async def find(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """An object; None if there is none of this name."""


@dataclass(frozen=True)
class _Answer:
    """What the API server said about the claim of a job.

    Attributes:
        job: uid and generation of the job.
        exists: Whether the claim exists; None: the request failed.
        at: Unix time of the request.
    """

    job: tuple[str, int]
    exists: bool | None
    at: float


class ExistingClaims:
    """Looks up the claims that jobs name.

    Args:
        server: The API server.
        ask_again_seconds: Time between two requests about a claim that is missing, or could not be looked up.
        clock: Returns Unix time.
    """

    def __init__(self, server: Server, ask_again_seconds: float, clock: Callable[[], float]) -> None:
        self._server = server
        self._ask_again_seconds = ask_again_seconds
        self._clock = clock
        self._answers: dict[JobKey, _Answer] = {}

    async def exists(self, job: CachedJob, pods: Sequence[Pod]) -> bool | None:
        """Whether the claim of a job exists; None: not known. True as well for a job that names none, or has ended.

        Args:
            job: The job.
            pods: Its pods.
        """
        if job.phase in _ENDED or any(pod.node for pod in pods):
            self.forget(job.key)  # its claim may be deleted before the job needs it again
            return True
        identity, answer = (job.uid, job.generation), self._answers.get(job.key)
        if answer is not None and answer.job != identity:
            answer = None  # the job names another claim now, or was resumed
        if answer is None or self._is_due(answer):
            known = answer.exists if answer is not None else None
            answer = _Answer(identity, await self._ask(job, known), self._clock())
            self._answers[job.key] = answer
        return answer.exists

    def forget(self, key: JobKey) -> None:
        """Forget what is known about a job."""
        self._answers.pop(key, None)

    def _is_due(self, answer: _Answer) -> bool:
        return answer.exists is not True and self._clock() - answer.at >= self._ask_again_seconds

    async def _ask(self, job: CachedJob, known: bool | None) -> bool | None:
        """Whether the claim exists; after an error what was known before."""
        storage: dict[str, Any] = (job.body["spec"] or {}).get("storage") or {}
        name = storage.get("existingClaim")
        if not name:
            return True
        try:
            return await self._server.find(CLAIMS, job.namespace, name) is not None
        except KubernetesError as error:
            logger.warning("cannot look up the claim %s, and continue without: %s", name, error)
            return known
