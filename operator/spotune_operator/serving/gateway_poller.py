"""Polls ``/stats`` of the gateways of each service, and adds up the differences of their counters.

Ray Serve may pass a poll on to the gateway of another pod, so gateways are told apart by their process and not by their
address. A gateway that is seen for the first time adds nothing: its counters began before. After a restart of the
operator, the comparison of a rollout's step therefore counts from then on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import aiohttp

from spotune.service import ModelServiceStatus
from spotune_operator.children.ports import SERVE
from spotune_operator.observe.json_response import base_url, json_object
from spotune_operator.serving.gateway_stats import GatewayStats, Histogram, Traffic, VersionCounters, parse_stats
from spotune_operator.serving.state import ServiceKey
from spotune_operator.settings import Settings

_WINDOW_SECONDS: Final = 60.0
"""Requests per second and median are those of this time."""
_PUBLISH_SECONDS: Final = 30.0
"""Minimum time between changes of these two figures: each costs a write of the status."""
_MISSING_AFTER_POLLS: Final = 4
"""A gateway that has not answered for so many intervals is missing; some polls may reach another one."""


@dataclass(frozen=True)
class _Sample:
    """The total of all versions at a time (Unix time)."""

    time: float
    requests: float
    first_token: Histogram


@dataclass
class _Target:
    """The gateways of a service.

    Attributes:
        addresses: Their addresses.
        task: The task that polls them.
        newest: The newest response and its Unix time, by process.
        totals: Requests since the first poll, by version.
        window: Identifies the last change of weights; ``before_window`` has the totals of that time.
        samples: The totals of the last minute.
        published: Unix time at which the load was published, requests per second, and milliseconds to the first token.
    """

    addresses: tuple[str, ...]
    task: asyncio.Task[None]
    newest: dict[str, tuple[float, GatewayStats]] = field(default_factory=dict)
    totals: dict[str, VersionCounters] = field(default_factory=dict)
    window: object = None
    before_window: dict[str, VersionCounters] = field(default_factory=dict)
    samples: deque[_Sample] = field(default_factory=deque)
    published: tuple[float, float | None, int | None] = (0.0, None, None)
    error: str = ""


class GatewayPoller:
    """Keeps the traffic of each service; an asynchronous context manager.

    Args:
        settings: Poll interval and timeout.
        changed: Called with the key of a service when its load has changed.
        clock: Returns Unix time.
        port: Port of the gateways.
    """

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[ServiceKey], None],
        clock: Callable[[], float] = time.time,
        port: int = SERVE.number,
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._clock = clock
        self._port = port
        self._targets: dict[ServiceKey, _Target] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.answer_seconds)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=self._settings.polls, force_close=True)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._targets):
            self.forget(key)
        if self._session is not None:
            await self._session.close()

    def forget(self, key: ServiceKey) -> None:
        """Stop polling a service."""
        target = self._targets.pop(key, None)
        if target is not None:
            target.task.cancel()

    def traffic(self, key: ServiceKey, addresses: Sequence[str], window: object) -> Traffic:
        """The traffic of a service, whose gateways are polled from now on.

        Args:
            key: The service.
            addresses: Addresses of its gateway pods; empty: polling stops.
            window: Changes with the weights: counters of ``since_change`` then begin anew. None: no rollout is in
                progress, so polls are rarer.
        """
        if not addresses:
            self.forget(key)
            return Traffic()
        target = self._targets.get(key)
        if target is None:
            task = asyncio.get_running_loop().create_task(self._poll_forever(key), name=f"stats of {'/'.join(key)}")
            target = self._targets[key] = _Target((), task, window=window)
        target.addresses = tuple(addresses)
        if target.window != window:
            target.window, target.before_window = window, dict(target.totals)
        return self._traffic(target)

    def _traffic(self, target: _Target) -> Traffic:
        oldest = self._clock() - _MISSING_AFTER_POLLS * self._settings.poll_seconds
        recent = [(at, stats) for at, stats in target.newest.values() if at >= oldest]
        missing = f"{len(recent)} of {len(target.addresses)} gateways have answered"
        before, nothing = target.before_window, VersionCounters()
        since = {name: total.plus(before.get(name, nothing), -1) for name, total in target.totals.items()}
        return Traffic(
            gateways=[stats for _, stats in recent],
            polled_at=min((at for at, _ in recent), default=0.0),
            error="" if len(recent) >= len(target.addresses) else target.error or missing,
            since_change=since,
            requests_per_second=target.published[1],
            first_token_milliseconds=target.published[2],
        )

    async def _poll_forever(self, key: ServiceKey) -> None:
        while True:
            target = self._targets[key]
            answers = await asyncio.gather(*(self._poll(address) for address in target.addresses))
            target.error = next((answer for answer in answers if isinstance(answer, str)), "")
            for answer in answers:
                if isinstance(answer, GatewayStats):
                    self._add(target, answer)
            if self._publish(target):
                self._changed(key)
            every = self._settings.poll_seconds if target.window is None else self._settings.start_poll_seconds
            await asyncio.sleep(every * random.uniform(0.8, 1.2))

    async def _poll(self, ip: str) -> GatewayStats | str:
        """The response of a gateway, or why there is none."""
        assert self._session is not None, "the poller is used within its context"
        address = base_url(ip, self._port)
        try:
            async with self._session.get(f"{address}/stats", allow_redirects=False) as response:
                return parse_stats(await json_object(response))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"the gateway at {address} does not answer ({str(error) or type(error).__name__})"

    def _add(self, target: _Target, stats: GatewayStats) -> None:
        """Add what has happened since the last response of this process."""
        now = self._clock()
        before = target.newest.get(stats.process)
        for name, version in stats.versions.items() if before is not None else ():
            earlier = before[1].versions.get(name) if before is not None else None
            difference = version.counters.plus(earlier.counters, -1) if earlier is not None else version.counters
            target.totals[name] = target.totals.get(name, VersionCounters()).plus(difference)
        target.newest[stats.process] = now, stats
        oldest = now - 2 * _MISSING_AFTER_POLLS * self._settings.poll_seconds
        target.newest = {process: found for process, found in target.newest.items() if found[0] >= oldest}

    def _publish(self, target: _Target) -> bool:
        """Update the load, unless that was done lately; returns whether it has changed."""
        now, samples = self._clock(), target.samples
        first_token = Histogram()
        for counters in target.totals.values():
            first_token = first_token.plus(counters.first_token)
        newest = _Sample(now, sum(counters.requests for counters in target.totals.values()), first_token)
        samples.append(newest)
        while len(samples) > 1 and samples[1].time <= now - _WINDOW_SECONDS:
            samples.popleft()
        published_at, *before = target.published
        seconds = now - samples[0].time
        if not target.newest or seconds <= 0 or now - published_at < _PUBLISH_SECONDS:
            return False
        rate = _rounded((newest.requests - samples[0].requests) / seconds)
        median = newest.first_token.plus(samples[0].first_token, -1).median()
        milliseconds = round(_rounded(median * 1000)) if median is not None else None
        target.published = now, rate, milliseconds
        return before != [rate, milliseconds]


def traffic_window(status: ModelServiceStatus) -> object:
    """Changes with the weights; None while no rollout is in progress and no version retires."""
    rollout = status.rollout
    if rollout is not None:
        return rollout.application, rollout.weight, rollout.step_started_at
    return tuple(each.application for each in status.retiring) or None


def _rounded(value: float) -> float:
    """Two significant digits: a status is not written for a smaller change."""
    return float(f"{value:.2g}")
