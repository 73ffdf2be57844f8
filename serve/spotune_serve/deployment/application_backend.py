"""The gateway's backend of one version: the replicas in an application of their own, which may come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from spotune_serve.deployment.token_transport.ray_backend import RayBackend
from spotune_serve.deployment.token_transport.receiver import TokenReceiver
from spotune_serve.engine.base import GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, VersionGoneError
from spotune_serve.gateway.waiting import Waiters

logger = logging.getLogger(__name__)

REPLICA: Final = "Replica"
"""Name of the deployment of replicas."""
_LEAVING = (ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED)
_POLL_SECONDS = 2.0


class ApplicationBackend:
    """Sends requests to the replicas of an application, as soon as Ray Serve has it.

    A `DeploymentHandle` of Ray 2.60 refuses requests once a deployment is deleted, but not while it is being deleted:
    then they wait for a replica, and nothing ends their wait. So this class asks for the application's state as long as
    requests wait.

    Args:
        application: name of the application.
        version: the version that it serves, for messages.
        receiver: where the tokens of its replicas arrive.
        scales_to_zero: whether it is no fault that there is no replica.
    """

    def __init__(
        self, application: str, version: str, receiver: TokenReceiver, *, scales_to_zero: bool = False
    ) -> None:
        self._application = application
        self._receiver = receiver
        self._version = version
        self._scales_to_zero = scales_to_zero
        self._replicas: RayBackend | None = None
        self._waiters = Waiters(self._gone)
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The new tokens of a sequence. Closing the iterator aborts the sequence on its replica.

        Raises:
            ReplicaLostError: the replica died or left.
            NoReplicaError: the application has failed and has no replica, or Ray Serve's controller does not answer.
            VersionGoneError: there is no such application.
        """
        replicas = self._replicas or await self._connect()
        try:
            async with aclosing(replicas.generate(request)) as chunks:
                async with self._waiters.wait():
                    self._start_watch()
                    first = await anext(chunks, None)
                if first is not None:
                    yield first
                async for chunk in chunks:
                    yield chunk
        except VersionGoneError:
            raise
        except NoReplicaError as error:
            if await asyncio.to_thread(self._is_deleted):
                raise self._gone() from error
            raise

    async def is_ready(self) -> bool:
        """Whether a replica answers, or would be started by a request."""
        try:
            replicas = self._replicas or await self._connect()
        except NoReplicaError:
            return False
        if self._scales_to_zero:
            return not await asyncio.to_thread(self._is_deleted)
        return await replicas.is_ready()

    async def _connect(self) -> RayBackend:
        """The replicas. Asking Ray Serve's controller for them blocks, so a thread does it.

        Raises:
            NoReplicaError: the controller does not answer, or does not know the applications yet.
            VersionGoneError: there is no such application.
        """
        try:
            handle: Any = await asyncio.to_thread(serve.get_deployment_handle, REPLICA, self._application)
        except KeyError as error:
            if await asyncio.to_thread(_applications) is None:
                raise NoReplicaError("Ray Serve does not know its applications yet") from error
            raise self._gone() from error
        except (RayError, RayServeException) as error:
            raise NoReplicaError(f"Ray Serve's controller does not answer: {error}") from error
        self._replicas = RayBackend(handle, self._receiver, scales_to_zero=self._scales_to_zero)
        return self._replicas

    def _start_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._abandon_waiters_if_deleted())

    async def _abandon_waiters_if_deleted(self) -> None:
        """Run as long as requests wait, and end their wait if the application is deleted meanwhile."""
        while self._waiters:
            await asyncio.sleep(_POLL_SECONDS)
            is_deleted = await asyncio.to_thread(self._is_deleted)
            if is_deleted:
                self._waiters.abandon()

    def _is_deleted(self) -> bool:
        """Whether Ray Serve has deleted the application or is deleting it. False while its controller cannot tell."""
        applications = _applications()
        if applications is None:
            return False
        application = applications.get(self._application)
        return application is None or application.status in _LEAVING

    def _gone(self) -> VersionGoneError:
        return VersionGoneError(f"the application {self._application} of version {self._version} does not exist")


def _applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """All applications; None while Ray Serve's controller cannot tell.

    While the controller restarts, Ray 2.60 waits for it. Without a controller, it raises an error, or returns no
    application at all. A new controller without the former one's checkpoint has no applications at first. The
    gateway's own application exists, so an answer without it is not complete.
    """
    try:
        own = serve.get_replica_context().app_name
        applications = serve.status().applications
    except (RayError, RayServeException) as error:
        logger.warning("Ray Serve's controller does not report its applications: %s", error)
        return None
    return applications if own in applications else None
