"""Polls ``/progress`` of the supervisor in each head pod: concurrently, with jitter, and no faster than settings allow.

A failed poll is recorded as such. It never counts as evidence that training has stopped.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Final, Self

import aiohttp

from spotune_operator.children.ports import PROGRESS
from spotune_operator.observe.json_response import base_url, json_object
from spotune_operator.observe.state import JobKey
from spotune_operator.observe.supervisor_status import PollResult, ProgressResponse, SupervisorResponse, parse_progress
from spotune_operator.settings import Settings

_STEADY_PHASES: Final = frozenset({"Training", "Evaluating", "Exporting", "Done", "Failed"})


@dataclass(frozen=True)
class _Request:
    """When a request was sent: its place among all requests, because a clock may be set back, and Unix time."""

    number: int
    time: float


@dataclass
class _Target:
    """A supervisor that is polled. `newest` is the number of the request that `poll` has the response to."""

    address: str
    task: asyncio.Task[None]
    poll: PollResult = field(default_factory=PollResult)
    newest: int = 0


class Poller:
    """Keeps the newest poll result of each job that has a head pod; an asynchronous context manager.

    Args:
        settings: Poll intervals, concurrency and timeout.
        changed: Called with the key of a job whose progress has changed.
        clock: Returns Unix time.
        port: Port of the supervisors.
    """

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[JobKey], None],
        clock: Callable[[], float] = time.time,
        port: int = PROGRESS.number,
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._clock = clock
        self._port = port
        self._limit = asyncio.Semaphore(settings.max_concurrent_polls)
        self._targets: dict[JobKey, _Target] = {}
        self._session: aiohttp.ClientSession | None = None
        self._numbers = count(1)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_seconds)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        polls = [target.task for target in self._targets.values()]
        for key in list(self._targets):
            self.set_target(key, "")
        await asyncio.gather(*polls, return_exceptions=True)  # each closes its connection before the session ends
        if self._session is not None:
            await self._session.close()

    def set_target(self, key: JobKey, ip: str) -> PollResult | None:
        """Poll a job's supervisor at this address from now on.

        Args:
            key: The job.
            ip: Address of its head pod; empty: there is none, so polling stops.

        Returns:
            The newest poll result of this address; None without a head pod.
        """
        address = base_url(ip, self._port) if ip else ""
        target = self._targets.get(key)
        if target is not None and target.address != address:
            target.task.cancel()
            del self._targets[key]
            target = None
        if target is None and address:
            task = asyncio.get_running_loop().create_task(self._poll_forever(key), name=f"progress of {'/'.join(key)}")
            target = self._targets[key] = _Target(address, task)
        return target.poll if target is not None else None

    def is_polling(self, key: JobKey) -> bool:
        """Whether the supervisor of a job is polled."""
        return key in self._targets

    async def send_command(self, key: JobKey, command: str) -> None:
        """Send ``stop`` or ``start`` to a job's supervisor, once.

        A failure is ignored: the next reconcile sends the command again if it is still needed.
        """
        target = self._targets.get(key)
        if target is None or self._session is None:
            return
        request = self._request()
        try:
            body = {"seconds": self._settings.stop_seconds}
            async with self._session.post(f"{target.address}/{command}", json=body, allow_redirects=False) as response:
                content = await json_object(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return
        if target.poll.response is not None:  # otherwise the first poll follows soon
            supervisor = SupervisorResponse.model_validate(content)
            self._store(key, target, target.poll.response.model_copy(update={"supervisor": supervisor}), request)

    async def _poll_forever(self, key: JobKey) -> None:
        while True:
            target = self._targets[key]
            async with self._limit:
                await self._poll(key, target)
            progress = target.poll.progress
            is_steady = progress.phase in _STEADY_PHASES and not progress.adopting
            every = self._settings.poll_seconds if is_steady else self._settings.start_poll_seconds
            await asyncio.sleep(every * random.uniform(0.8, 1.2))

    async def _poll(self, key: JobKey, target: _Target) -> None:
        assert self._session is not None, "the poller is used within its context"
        request = self._request()
        try:
            async with self._session.get(f"{target.address}/progress", allow_redirects=False) as response:
                content = await json_object(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            text = f"the supervisor at {target.address} does not answer ({str(error) or type(error).__name__})"
            is_first_failure = target.poll.failing_since is None
            since = self._clock() if is_first_failure else target.poll.failing_since
            target.poll = replace(target.poll, failing_since=since, error=text)
            if is_first_failure:
                self._changed(key)
            return
        self._store(key, target, parse_progress(content), request)

    def _request(self) -> _Request:
        return _Request(next(self._numbers), self._clock())

    def _store(self, key: JobKey, target: _Target, response: ProgressResponse, request: _Request) -> None:
        """Keep a response, unless there is one to a later request: a poll may overlap with a command."""
        if request.number < target.newest:
            return
        before = target.poll
        target.poll, target.newest = PollResult(response, request.time), request.number
        if before.failing_since is not None or before.response is None or not before.response.same_progress(response):
            self._changed(key)
