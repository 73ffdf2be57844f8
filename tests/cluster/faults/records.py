"""Results of the faults as JSON lines: written by the suite, read by the report."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.fault_records import FaultRecord, newest_records, recording
from tests.provenance import commit

VARIABLE = "SPOTUNE_FAULTS_RECORDS"


@dataclass
class Record(FaultRecord):
    """The result of one fault; further fields are those of `FaultRecord`.

    Attributes:
        restarts: Number of restarts by cause.
        detect_seconds: From the fault to the first record of it; None if nothing had to restart.
        new_step_seconds: From the fault to the first step that was not made before.
        longest_gap_seconds: Longest pause between two steps, if the worker group continues without a head.
    """

    restarts: dict[str, int] = field(default_factory=dict)
    detect_seconds: float | None = None
    new_step_seconds: float | None = None
    longest_gap_seconds: float | None = None


def recorded(fault: str) -> AbstractContextManager[Record]:
    """Append a record to the file in $SPOTUNE_FAULTS_RECORDS, if set, whether the block passes or raises."""
    return recording(Record(fault, commit=commit()), VARIABLE)


def read_records(path: Path) -> dict[str, Record]:
    """The newest record of each fault."""
    return newest_records(path, Record)
