"""Fuzzes a parser for some time. Inputs that fail are kept, and are the first that the next run reads."""

from __future__ import annotations

import logging
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.records import Record, append_record
from tests.fuzz.target import Target, fuzz
from tests.provenance import commit

_INPUTS_OF_A_TURN = 500
_MAX_SECONDS_OF_A_TURN = 60.0

logger = logging.getLogger("spotune.fuzz")


def run_for(target: Target, seconds: float, records: Path, work: Path) -> bool:
    """Fuzz a parser for at least this time, in turns, and record each turn.

    Args:
        target: the parser.
        seconds: wall clock. At least a turn is run.
        records: file of the records.
        work: folder for hypothesis' database, and for the text of a failure.

    Returns:
        Whether no input failed. A failure ends the run, since the next turns would only find it again.
    """
    database = DirectoryBasedExampleDatabase(work / "examples")
    until = time.monotonic() + seconds
    inputs = _INPUTS_OF_A_TURN
    while True:
        started = time.monotonic()
        found, failure = 0, ""
        try:
            found = fuzz(target, inputs, database)
        except Exception:  # noqa: BLE001 - whatever the parser raises is what is looked for
            failure = traceback.format_exc()
        spent = time.monotonic() - started
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        append_record(records, Record(target.name, commit(), round(spent, 1), found, int(bool(failure)), day))
        if failure:
            work.mkdir(parents=True, exist_ok=True)
            (work / f"{target.name}.txt").write_text(failure, encoding="utf-8", errors="replace")
            logger.error("%s: a failure, in %s", target.name, work / f"{target.name}.txt")
            return False
        logger.info("%s: %s inputs in %.0f s", target.name, f"{found:,}", spent)
        left = until - time.monotonic()
        if left <= 0:
            return True
        # Hypothesis spends more on each input the longer a turn is, so turns stay short.
        inputs = max(100, int(inputs * min(_MAX_SECONDS_OF_A_TURN, left) / max(spent, 0.1)))
