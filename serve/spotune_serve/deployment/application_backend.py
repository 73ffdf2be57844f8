"""The gateway's backend of one version: the replicas in an application of their own, which may come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Final

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from spotune_serve.deployment.token_transport.ray_backend import RayBackend
from spotune_serve.deployment.token_transport.receiver import TokenReceiver
from spotune_serve.engine.base import GenerationRequest, TokenChunk
from spotune_serve.gateway.backend import NoReplicaError, VersionGoneError
from spotune_serve.gateway.waiting import Waiters

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
            NoReplicaError: the application has failed and has no replica.
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
            if await asyncio.to_thread(self._exists):
                raise
            raise self._gone() from error

    async def is_ready(self) -> bool:
        """Whether a replica answers, or would be started by a request."""
        try:
            replicas = self._replicas or await self._connect()
        except VersionGoneError:
            return False
        if self._scales_to_zero:
            return await asyncio.to_thread(self._exists)
        return await replicas.is_ready()

    async def _connect(self) -> RayBackend:
        """The replicas. Asking Ray Serve's controller for them blocks, so a thread does it."""
        try:
            handle: Any = await asyncio.to_thread(serve.get_deployment_handle, REPLICA, self._application)
        except (KeyError, RayServeException) as error:
            raise self._gone() from error
        self._replicas = RayBackend(handle, self._receiver, scales_to_zero=self._scales_to_zero)
        return self._replicas

    def _start_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._abandon_waiters_if_gone())

    async def _abandon_waiters_if_gone(self) -> None:
        """Run as long as requests wait, and end their wait if the application is deleted meanwhile."""
        while self._waiters:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(RayError, RayServeException):  # the controller is restarting
                if self._waiters and not await asyncio.to_thread(self._exists):
                    self._waiters.abandon()

    def _exists(self) -> bool:
        """Whether Ray Serve has the application and does not delete it."""
        application = serve.status().applications.get(self._application)
        return application is not None and application.status not in _LEAVING

    def _gone(self) -> VersionGoneError:
        return VersionGoneError(f"the application {self._application} of version {self._version} does not exist")
