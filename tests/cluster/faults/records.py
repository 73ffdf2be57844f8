"""Results of the faults as JSON lines: written by the suite, read by the report."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.provenance import commit

VARIABLE = "SPOTUNE_FAULTS_RECORDS"


@dataclass
class Record:
    """The result of one fault.

    Attributes:
        fault: Its name.
        result: "" while it runs, then "passed" or the error.
        restarts: Number of restarts by cause.
        detect_seconds: From the fault to the first record of it; None if nothing had to restart.
        new_step_seconds: From the fault to the first step that was not made before.
        wall_seconds: Duration of the whole test.
        commit: The tested commit.
    """

    fault: str
    result: str = ""
    restarts: dict[str, int] = field(default_factory=dict)
    detect_seconds: float | None = None
    new_step_seconds: float | None = None
    wall_seconds: float = 0.0
    commit: str = ""


@contextmanager
def recorded(fault: str) -> Iterator[Record]:
    """Append a record to the file in $SPOTUNE_FAULTS_RECORDS, if set, whether the block passes or raises."""
    record, start = Record(fault, commit=commit()), time.monotonic()
    try:
        yield record
        record.result = "passed"
    except BaseException as error:
        record.result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise
    finally:
        record.wall_seconds = round(time.monotonic() - start, 1)
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> dict[str, Record]:
    """The newest record of each fault."""
    records = (Record(**json.loads(line)) for line in path.read_text().splitlines())
    return {record.fault: record for record in records}
