"""Results of the faults of a service as JSON lines: written by the suite, read by the report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.provenance import commit, machine

VARIABLE = "SPOTUNE_SERVING_FAULTS_RECORDS"


@dataclass
class Record:
    """The result of one fault.

    Attributes:
        fault: Its name.
        result: "" while it runs, then "passed" or the error.
        requests: Number of requests.
        in_mid_answer: Streams that had text, and not all of it, when the fault was injected.
        resumptions: How often a sequence was sent to another replica.
        failed: Streams that ended with an error, or without their end.
        other_text: Streams whose text differs from that of the same request without a fault.
        gap_p50_seconds: Longest time between two texts of a stream: median over the streams.
        gap_max_seconds: Its maximum.
        ready_seconds: From the fault until the service was Ready with all replicas.
        wall_seconds: Duration of the whole test.
        commit: The tested commit.
        machine: Date, machine and versions.
    """

    fault: str
    result: str = ""
    requests: int = 0
    in_mid_answer: int = 0
    resumptions: int = 0
    failed: int = 0
    other_text: int = 0
    gap_p50_seconds: float = 0.0
    gap_max_seconds: float = 0.0
    ready_seconds: float | None = None
    wall_seconds: float = 0.0
    commit: str = ""
    machine: str = ""


@contextmanager
def recorded(fault: str) -> Iterator[Record]:
    """Append a record to the file in $SPOTUNE_SERVING_FAULTS_RECORDS, if set, whether the block passes or raises."""
    record, start = Record(fault, commit=commit(), machine=machine()), time.monotonic()
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
