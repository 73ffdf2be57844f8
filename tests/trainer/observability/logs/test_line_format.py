"""The line format of log files: timestamps that sort as text, and which records a file gets."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spotune_trainer.observability.logs.line_format import (
    LineFormatter,
    format_timestamp,
    logging_to_file,
    timestamp_of,
)

SECONDS = 1_800_000_000.0


def test_log_file_has_own_records_and_warnings_of_other_libraries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker-0.log"
    with caplog.at_level(logging.INFO), logging_to_file(path):  # some libraries lower the root level
        logging.getLogger("spotune.worker").info("phase %s", "Training")
        logging.getLogger("urllib3").info("a connection")
        logging.getLogger("urllib3").warning("a retry")
    logging.getLogger("spotune.worker").warning("too late")
    assert [line.split(" ", 1)[1] for line in path.read_text().splitlines()] == [
        "INFO phase Training",
        "WARNING a retry",
    ]


def test_timestamps_sort_as_text() -> None:
    record = logging.LogRecord("spotune", logging.INFO, "", 0, "text", None, None)
    record.created = SECONDS + 0.25
    line = LineFormatter().format(record)
    assert line == "2027-01-15T08:00:00.250Z INFO text"
    assert timestamp_of(line) == "2027-01-15T08:00:00.250Z" == format_timestamp(SECONDS + 0.25)
    assert format_timestamp(SECONDS) < format_timestamp(SECONDS + 0.25) < format_timestamp(SECONDS + 1)
    assert timestamp_of("Traceback (most recent call last):") == ""
