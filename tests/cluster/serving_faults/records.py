"""Results of the faults of a service as JSON lines: written by the suite, read by the report."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.fault_records import FaultRecord, newest_records, recording
from tests.provenance import commit, machine

VARIABLE = "SPOTUNE_SERVING_FAULTS_RECORDS"
TOKENS = 384
"""Of each answer: so many that no stream has ended before the last one begins, and so few that all of a replica fit
into its cache at once, although those that begin later are padded to the length of the others."""
_FORMER_TOKENS = 256
"""Those of records without the number."""


@dataclass
class Record(FaultRecord):
    """The result of one fault; further fields are those of `FaultRecord`.

    Attributes:
        requests: Number of requests.
        tokens: Tokens of each answer.
        in_mid_answer: Streams that had text, and not all of it, when the fault was injected.
        resumptions: How often a sequence was sent to another replica.
        failed: Streams that ended with an error, or without their end.
        other_text: Streams whose text differs from that of the same request without a fault.
        gap_p50_seconds: Longest time between two texts of a stream: median over the streams.
        gap_max_seconds: Its maximum.
        ready_seconds: From the fault until the service was Ready with all replicas.
        replicas_had_loaded: Whether a ready replica had loaded its model. In old records, Ray Serve ran on its pod.
        machine: Date, machine and versions.
    """

    requests: int = 0
    tokens: int = _FORMER_TOKENS
    in_mid_answer: int = 0
    resumptions: int = 0
    failed: int = 0
    other_text: int = 0
    gap_p50_seconds: float = 0.0
    gap_max_seconds: float = 0.0
    ready_seconds: float | None = None
    replicas_had_loaded: bool = False
    machine: str = ""


def recorded(fault: str) -> AbstractContextManager[Record]:
    """Append a record to the file in $SPOTUNE_SERVING_FAULTS_RECORDS, if set, whether the block passes or raises."""
    record = Record(fault, tokens=TOKENS, replicas_had_loaded=True, commit=commit(), machine=machine())
    return recording(record, VARIABLE)


def read_records(path: Path) -> dict[str, Record]:
    """The newest record of each fault."""
    return newest_records(path, Record)
