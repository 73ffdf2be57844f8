"""Results of the faults as JSON lines: written by the suite, read by the report."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.fault_records import FaultRecord, newest_records, recording, skip_if_passed
from tests.cluster.faults.harness import InjectedFault
from tests.cluster.faults.timeline import Recovery
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

    def measure(self, injected: InjectedFault, recovery: Recovery | None) -> None:
        """Record what a fault caused; `recovery` is None if it interrupted nothing."""
        self.restarts = injected.restarts
        self.longest_gap_seconds = injected.longest_gap_seconds
        if recovery is not None:
            self.detect_seconds = round(recovery.seconds_to_detect, 1)
            self.new_step_seconds = round(recovery.seconds_to_new_step, 1)


def counted(restarts: Mapping[str, int]) -> dict[str, int]:
    """The restarts of a job's status that happened, by cause."""
    return {cause: count for cause, count in restarts.items() if count and cause != "total"}


def recorded(fault: str) -> AbstractContextManager[Record]:
    """Append a record to the file in $SPOTUNE_FAULTS_RECORDS, if set, whether the block passes or raises.

    A fault that has passed in an earlier sitting is skipped.
    """
    record = Record(fault, commit=commit())
    skip_if_passed(record, VARIABLE)
    return recording(record, VARIABLE)


def read_records(path: Path) -> dict[str, Record]:
    """The newest record of each fault."""
    return newest_records(path, Record)
