"""Polls ``/stats`` of the gateways of each service: adds up the differences of their counters, and counts replicas.

Ray Serve may pass a poll on to the gateway of another pod, so gateways are told apart by their process and not by their
address. A gateway that is seen for the first time adds nothing: its counters began before. After a restart of the
operator, the comparison of a rollout's step therefore counts from then on.

A number of replicas holds until their pods change: a pod whose container restarted is ready again before its replica
has loaded the model.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import aiohttp

from spotune.service import ModelServiceStatus
from spotune_operator.children.ports import SERVE
from spotune_operator.observe.json_response import base_url, json_object
from spotune_operator.serving.gateway_stats import (
    GatewayStats,
    Histogram,
    Traffic,
    VersionCounters,
    has_unplaced_replica,
    parse_stats,
)
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
        since: Unix time of the first poll.
        pods: Identifies the ready pods with replicas.
        pods_changed: Set when they change: the next poll is due.
        running_replicas: The number of replicas that the last poll found; None: unknown, or their pods changed since.
        reported: ``running_replicas``, ``no_replica_report`` and ``has_unplaced_replica`` as returned last, or at the
            last call of ``changed``.
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
    since: float = 0.0
    pods: Sequence[Hashable] = ()
    pods_changed: asyncio.Event = field(default_factory=asyncio.Event)
    running_replicas: int | None = None
    reported: tuple[int | None, bool, bool] = (None, False, False)


class GatewayPoller:
    """Keeps the traffic of each service; an asynchronous context manager.

    Args:
        settings: Poll interval and timeout.
        changed: Called with the key of a service when its load or its number of replicas has changed.
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
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_seconds)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=self._settings.max_concurrent_polls, force_close=True)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        polls = [target.task for target in self._targets.values()]
        for key in list(self._targets):
            self.forget(key)
        await asyncio.gather(*polls, return_exceptions=True)  # each closes its connection before the session ends
        if self._session is not None:
            await self._session.close()

    def forget(self, key: ServiceKey) -> None:
        """Stop polling a service."""
        target = self._targets.pop(key, None)
        if target is not None:
            target.task.cancel()

    def traffic(
        self, key: ServiceKey, addresses: Sequence[str], window: object, pods: Sequence[Hashable] = ()
    ) -> Traffic:
        """The traffic of a service, whose gateways are polled from now on.

        Args:
            key: The service.
            addresses: Addresses of its gateway pods; empty: polling stops.
            window: Changes with the weights: counters of ``since_change`` then begin anew. None: no rollout is in
                progress, so polls are rarer.
            pods: Identifies the ready pods with replicas, and their last start.
        """
        if not addresses:
            self.forget(key)
            return Traffic()
        target, pods = self._targets.get(key), tuple(pods)
        if target is None:
            task = asyncio.get_running_loop().create_task(self._poll_forever(key), name=f"stats of {'/'.join(key)}")
            target = self._targets[key] = _Target((), task, window=window, since=self._clock(), pods=pods)
        target.addresses = tuple(addresses)
        if target.pods != pods:
            target.pods, target.running_replicas = pods, None
            target.pods_changed.set()
        if target.window != window:
            target.window, target.before_window = window, dict(target.totals)
        target.reported = self._reported(target)
        return self._traffic(target)

    def _traffic(self, target: _Target) -> Traffic:
        recent = self._recent(target)
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
            running_replicas=target.running_replicas,
            no_replica_report=self._no_replica_report(target),
        )

    def _recent(self, target: _Target) -> list[tuple[float, GatewayStats]]:
        """The newest response, with its time, of each gateway that has answered lately."""
        return [(at, stats) for at, stats in target.newest.values() if at >= self._missing_before()]

    def _missing_before(self) -> float:
        """A gateway whose last response is older than this Unix time is missing."""
        return self._clock() - _MISSING_AFTER_POLLS * self._settings.poll_seconds

    def _no_replica_report(self, target: _Target) -> bool:
        """Whether no gateway can tell the number of replicas: see ``Traffic``."""
        recent = self._recent(target)
        if not recent:
            return target.since < self._missing_before()
        return not any(stats.reports_replicas for _, stats in recent)

    def _reported(self, target: _Target) -> tuple[int | None, bool, bool]:
        """See ``_Target``. Unlike the whole traffic, this is computed at every poll."""
        has_unplaced = has_unplaced_replica(stats for _, stats in self._recent(target))
        return target.running_replicas, self._no_replica_report(target), has_unplaced

    async def _poll_forever(self, key: ServiceKey) -> None:
        while True:
            target = self._targets[key]
            target.pods_changed.clear()
            answers = await asyncio.gather(*(self._poll(address) for address in target.addresses))
            target.error = next((answer for answer in answers if isinstance(answer, str)), "")
            for answer in answers:
                if isinstance(answer, GatewayStats):
                    self._add(target, answer)
            if not target.pods_changed.is_set():
                numbers = [answer.running_replicas for answer in answers if isinstance(answer, GatewayStats)]
                target.running_replicas = min((each for each in numbers if each is not None), default=None)
            before, target.reported = target.reported, self._reported(target)
            if self._publish(target) or target.reported != before:
                self._changed(key)
            with suppress(TimeoutError):
                await asyncio.wait_for(target.pods_changed.wait(), self._interval(target) * random.uniform(0.8, 1.2))

    def _interval(self, target: _Target) -> float:
        """Seconds until the next poll: few during a rollout, and while a replica loads its model."""
        is_loading = target.running_replicas != len(target.pods) and not self._no_replica_report(target)
        is_starting = target.window is not None or is_loading
        return self._settings.start_poll_seconds if is_starting else self._settings.poll_seconds

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
