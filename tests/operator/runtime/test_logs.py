"""The operator's log as JSON lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from spotune_operator.runtime.logs import JsonFormatter, log_as_json, log_context

logger = logging.getLogger("spotune_operator.test")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The output of a handler with `JsonFormatter`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_record_is_one_line_of_json(written: io.StringIO) -> None:
    logger.warning("watching %s: %s", "pods", 'it reported\n"no"')
    (line,) = lines(written)
    assert (line["level"], line["logger"], line["message"]) == (
        "warning",
        "spotune_operator.test",
        'watching pods: it reported\n"no"',
    )
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert "job" not in line


def test_record_of_a_reconcile_names_its_job(written: io.StringIO) -> None:
    async def work(key: tuple[str, str]) -> None:
        with log_context(key):
            await asyncio.sleep(0)  # reconciles of other jobs run meanwhile
            logger.info("pass")
        logger.info("after")

    async def main() -> None:
        await asyncio.gather(work(("team", "a")), work(("other", "b")))

    asyncio.run(main())
    records = [(line["message"], line.get("namespace"), line.get("job")) for line in lines(written)]
    assert sorted(records, key=str) == [
        ("after", None, None),
        ("after", None, None),
        ("pass", "other", "b"),
        ("pass", "team", "a"),
    ]


def test_error_has_its_traceback(written: io.StringIO) -> None:
    try:
        raise ValueError("of a kind")
    except ValueError:
        logger.exception("the pass failed")
    (line,) = lines(written)
    assert line["message"] == "the pass failed"
    assert line["traceback"].splitlines()[0] == "Traceback (most recent call last):"
    assert line["traceback"].splitlines()[-1] == "ValueError: of a kind"


def test_all_logs_go_to_standard_error_without_kopfs_event_records(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        log_as_json()
        logging.getLogger("kopf.objects").info("Handler 'on_job' succeeded.")
        logging.getLogger("kopf.activities").info("Initial authentication has finished.")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("kopf.objects").setLevel(logging.NOTSET)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["logger"] == "kopf.activities"
