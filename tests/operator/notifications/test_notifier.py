"""Notifications against a real HTTP server that fails for a while, is slow, or refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spotune.custom_resource import Condition
from spotune.errors import UsageError
from spotune_operator.kube.phase_change import PhaseChange, reason_of
from spotune_operator.notifications.notifier import Limits, Notifier
from spotune_operator.notifications.targets import PHASES, Target, parse_targets
from spotune_trainer.job_directory.status import Phase

CHANGE = PhaseChange("FinetuneJob", "team", "t5-sql", "u1", "7", "Training", "Failed", "loss is nan", 12, 100)
FAST = Limits(first_wait=0.02, longest_wait=0.1, per_minute=60_000)
PATH = "/hook/a-password"
ANSWER_SECONDS = 10.0
"""How long the operator waits for an answer."""


@dataclass
class Receiver:
    """What a server gets, and the statuses that it answers with; 200 after the last one."""

    statuses: list[int] = field(default_factory=list)
    got: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def accepted(self) -> list[dict[str, Any]]:
        """The bodies that were answered with 200."""
        return [body for status, body in self.got if status == 200]

    async def answer(self, request: web.Request) -> web.Response:
        """Handle a request."""
        await asyncio.sleep(self.delay)
        status = self.statuses.pop(0) if self.statuses else 200
        self.got.append((status, await request.json()))
        return web.Response(status=status, headers=self.headers)


@asynccontextmanager
async def serving(receiver: Receiver, folder: Path, port: int = 0) -> AsyncIterator[Path]:
    """A server for the block; yields the file with its URL."""
    app = web.Application()
    app.router.add_post(PATH, receiver.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        file = folder / "url"
        file.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}\n")
        yield file
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, 10 s at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it may depend on anything
            await asyncio.sleep(0.01)


class Counts(Counter[str]):
    """Counts results as the operator's metrics do."""

    def __call__(self, result: str, number: int = 1) -> None:
        self[result] += number


def test_each_change_arrives_once_and_in_order_although_the_server_fails_for_a_while(tmp_path: Path) -> None:
    async def run() -> None:
        receiver, counts = Receiver(statuses=[500, 503, 429]), Counts()
        async with (
            serving(receiver, tmp_path) as file,
            Notifier([Target(name="hook", url_file=file)], counts, FAST) as it,
        ):
            start = time.monotonic()
            for number in range(5):
                it.phase_changed(replace(CHANGE, version=str(number)))
            assert time.monotonic() - start < ANSWER_SECONDS  # a reconcile does not wait
            await until(lambda: len(receiver.accepted) == 5)
        identities = [body["id"] for body in receiver.accepted]
        assert len(set(identities)) == 5
        assert [body["id"] for _, body in receiver.got] == [identities[0]] * 4 + identities[1:]
        assert dict(counts) == {"retried": 3, "sent": 5}
        body = receiver.accepted[0]
        assert {name: body[name] for name in ("namespace", "name", "previousPhase", "phase", "message", "step")} == {
            "namespace": "team",
            "name": "t5-sql",
            "previousPhase": "Training",
            "phase": "Failed",
            "message": "loss is nan",
            "step": 12,
        }

    asyncio.run(run())


def test_a_server_that_is_down_gets_the_change_when_it_is_back_and_no_log_has_its_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        receiver, counts, up = Receiver(), Counts(), Receiver()
        down = socket.socket()  # keeps the port of the server that is down
        down.bind(("127.0.0.1", 0))
        port = down.getsockname()[1]
        (tmp_path / "url").write_text(f"http://127.0.0.1:{port}{PATH}\n")
        targets = [Target(name="hook", url_file=tmp_path / "url"), Target(name="late", url_file=tmp_path / "missing")]
        (tmp_path / "other").mkdir()
        async with Notifier([*targets, Target(name="up", url_file=tmp_path / "other/url")], counts, FAST) as it:
            async with serving(up, tmp_path / "other"):
                it.phase_changed(CHANGE)
                await until(lambda: len(up.accepted) == 1 and counts["retried"] >= 4)  # the others do not delay it
            down.close()
            async with serving(receiver, tmp_path, port) as file:
                (tmp_path / "missing").write_text(file.read_text())
                await until(lambda: len(receiver.accepted) == 2)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "notification to hook failed, next attempt in" in caplog.text
    assert "notification to late failed" in caplog.text
    assert "a-password" not in caplog.text


def test_what_cannot_arrive_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> Counts:
        receiver, counts = Receiver(statuses=[404], headers={"Location": "http://127.0.0.1:1/"}), Counts()
        limits = replace(FAST, capacity=2, max_age=0.2)
        async with (
            serving(receiver, tmp_path) as file,
            Notifier([Target(name="hook", url_file=file)], counts, limits) as it,
        ):
            it.phase_changed(CHANGE)
            await until(lambda: counts["dropped"] == 1)  # refused
            receiver.statuses += [302]
            it.phase_changed(CHANGE)
            await until(lambda: counts["dropped"] == 2)  # a redirect is not followed
            receiver.statuses += [500] * 1000
            for number in range(4):
                it.phase_changed(replace(CHANGE, version=str(number)))
            assert counts["dropped"] == 4  # the two oldest
            await until(lambda: counts["dropped"] == 6)  # too old
        return counts

    counts = asyncio.run(run())
    assert counts["sent"] == 0
    assert "HTTP 404" in caplog.text
    assert "more than 2 wait" in caplog.text


def test_requests_to_a_target_are_limited(tmp_path: Path) -> None:
    async def run() -> float:
        receiver = Receiver()
        limits = Limits(per_minute=600, burst=2)
        async with (
            serving(receiver, tmp_path) as file,
            Notifier([Target(name="hook", url_file=file)], Counts(), limits) as it,
        ):
            start = time.monotonic()
            for number in range(6):
                it.phase_changed(replace(CHANGE, version=str(number)))
            await until(lambda: len(receiver.accepted) == 6)
            return time.monotonic() - start

    assert asyncio.run(run()) > 0.35  # 2 at once, then 4 at 10 a second


def test_the_end_of_the_operator_waits_for_what_is_being_sent(tmp_path: Path) -> None:
    async def run() -> tuple[int, Counts]:
        receiver, counts = Receiver(delay=0.3), Counts()
        async with serving(receiver, tmp_path) as file:
            async with Notifier([Target(name="hook", url_file=file)], counts, FAST) as it:
                it.phase_changed(CHANGE)
            return len(receiver.accepted), counts

    assert asyncio.run(run()) == (1, {"sent": 1})


def test_targets_choose_phases_namespaces_and_format() -> None:
    text = json.dumps(
        [
            {"name": "slack", "urlFile": "/a", "format": "slack", "namespaces": ["team"]},
            {"name": "all", "urlFile": "/b", "phases": ["*"]},
        ]
    )
    slack, every = parse_targets(text)
    assert slack.body(replace(CHANGE, message="a <b> & c"), "i", "t") == {
        "text": "FinetuneJob team/t5-sql is Failed at step 12/100: a &lt;b&gt; &amp; c"
    }
    asked = [CHANGE, replace(CHANGE, phase="Training"), replace(CHANGE, namespace="other")]
    assert [slack.wants(change) for change in asked] == [True, False, False]
    assert [every.wants(change) for change in asked] == [True, True, True]
    with pytest.raises(UsageError, match="Finished is not a phase: use"):
        parse_targets(text.replace('"*"', '"Finished"'))


def test_every_phase_of_a_run_is_known() -> None:
    assert {phase.value for phase in Phase} - PHASES == {"Done"}  # the operator shows Exporting


def test_the_message_is_that_of_the_cause() -> None:
    def condition(name: str, status: str, message: str) -> Condition:
        return Condition(type=name, status=status, reason="R", message=message, last_transition_time="t")  # type: ignore[arg-type]

    found = [
        condition("Stalled", "True", "see condition StorageReady"),
        condition("StorageReady", "False", "no class x"),
    ]
    assert reason_of("Stalled", found) == "no class x"
    assert reason_of("Failed", found) == ""
