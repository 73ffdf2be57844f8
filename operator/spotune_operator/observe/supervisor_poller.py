"""Asks the supervisors in the head pods how training goes: side by side, at uneven times, and never more than it helps.

What a supervisor says is shown and acted on; that it does not answer proves nothing and ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from spotune_operator.children.ports import PROGRESS
from spotune_operator.observe.state import JobKey
from spotune_operator.observe.supervisor_status import Reading, Said, SaidSupervisor, understood
from spotune_operator.settings import Settings

_LARGEST_BYTES: Final = 1 << 20
_STEADY: Final = frozenset({"Training", "Evaluating", "Exporting", "Done", "Failed"})


@dataclass
class _Target:
    """A supervisor that is asked again and again."""

    address: str
    task: asyncio.Task[None]
    reading: Reading = field(default_factory=Reading)


class Poller:
    """Keeps the newest reading of each job that has a head pod; an asynchronous context manager.

    Args:
        settings: How often, how many at a time, how patiently.
        changed: Called with the job whose reading says something new.
        clock: Unix time.
        port: At which supervisors answer.
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
        self._limit = asyncio.Semaphore(settings.polls)
        self._targets: dict[JobKey, _Target] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.answer_seconds)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._targets):
            self.watch(key, "")
        if self._session is not None:
            await self._session.close()

    def watch(self, key: JobKey, ip: str) -> Reading | None:
        """Have a job's supervisor asked at an address from now on; the newest reading.

        Args:
            key: The job.
            ip: Of its head pod; empty: there is none, and nobody is asked any more.
        """
        address = f"http://{f'[{ip}]' if ':' in ip else ip}:{self._port}" if ip else ""
        target = self._targets.get(key)
        if target is not None and target.address != address:
            target.task.cancel()
            del self._targets[key]
            target = None
        if target is None and address:
            task = asyncio.get_running_loop().create_task(self._follow(key), name=f"progress of {'/'.join(key)}")
            target = self._targets[key] = _Target(address, task)
        return target.reading if target is not None else None

    def asks(self, key: JobKey) -> bool:
        """Whether a job has a supervisor that is asked."""
        return key in self._targets

    async def ask(self, key: JobKey, what: str) -> None:
        """Tell a job's supervisor to ``stop`` or to ``start``; once, without minding whether it heard.

        It is told again with the next pass if it did not.
        """
        target = self._targets.get(key)
        if target is None or self._session is None:
            return
        try:
            body = {"seconds": self._settings.stop_seconds}
            async with self._session.post(f"{target.address}/{what}", json=body, allow_redirects=False) as answer:
                content = await _content(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return
        if target.reading.answer is not None:  # or else the rest is soon known, too
            supervisor = SaidSupervisor.model_validate(content)
            self._take_in(key, target, target.reading.answer.model_copy(update={"supervisor": supervisor}))

    async def _follow(self, key: JobKey) -> None:
        while True:
            target = self._targets[key]
            async with self._limit:
                await self._look(key, target)
            phase = target.reading.said.phase
            every = self._settings.poll_seconds if phase in _STEADY else self._settings.start_poll_seconds
            await asyncio.sleep(every * random.uniform(0.8, 1.2))

    async def _look(self, key: JobKey, target: _Target) -> None:
        assert self._session is not None, "supervisors are asked within the context"
        try:
            async with self._session.get(f"{target.address}/progress", allow_redirects=False) as answer:
                content = await _content(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            failed = target.reading.failing_since is not None
            words = f"the supervisor at {target.address} does not answer ({str(error) or type(error).__name__})"
            since = target.reading.failing_since if failed else self._clock()
            target.reading = replace(target.reading, failing_since=since, error=words)
            if not failed:
                self._changed(key)
            return
        self._take_in(key, target, understood(content))

    def _take_in(self, key: JobKey, target: _Target, answer: Said) -> None:
        before = target.reading
        target.reading = Reading(answer, self._clock())
        if before.failing_since is not None or before.answer is None or not before.answer.says_the_same(answer):
            self._changed(key)


async def _content(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        ValueError: It is none, or larger than any supervisor's.
    """
    if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
        raise ValueError(f"it says {answer.status} {answer.reason}")
    text = bytearray()
    async for part in answer.content.iter_any():
        text += part
        if len(text) > _LARGEST_BYTES:
            raise ValueError("its answer does not end")
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("its answer is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("its answer is not a JSON object")
    return found
