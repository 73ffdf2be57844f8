"""Fixtures of several tests of the driver."""

import time

import pytest


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day stands still: no deadline comes closer while a busy machine lets a test wait."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
