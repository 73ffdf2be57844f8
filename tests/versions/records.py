"""Results of the tests with other versions, as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import ROOT

RECORDS = ROOT / "benchmarks/results/versions.jsonl"
FAST = "fast tests"
"""`test` of a record of all fast tests; other records name a fault."""
PASSED = "passed"


@dataclass(frozen=True)
class Versions:
    """What a test ran with. What took no part is empty.

    Attributes:
        python: 3.12.1
        ray: 2.60.0
        kubernetes: Version of the control plane: 1.37.2
        nodes: Version of kubelet and kube-proxy, which may be older than the control plane.
        kuberay: 1.6.2
    """

    python: str
    ray: str
    kubernetes: str = ""
    nodes: str = ""
    kuberay: str = ""


@dataclass(frozen=True)
class Record:
    """The result of a test with some versions.

    Attributes:
        test: `FAST`, or the name of a fault.
        versions: What it ran with.
        result: "passed", or what failed.
        seconds: How long it took.
        commit: The tested commit.
        date: The day, such as 2026-11-28.
        command: The command that writes such a record.
        counts: Number of tests by outcome; empty for a fault.
    """

    test: str
    versions: Versions
    result: str
    seconds: float
    commit: str
    date: str
    command: str
    counts: dict[str, int]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.result == PASSED


def append(record: Record, path: Path = RECORDS) -> None:
    """Add a record."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path = RECORDS) -> list[Record]:
    """The newest record of each test with each combination of versions, in the order of the first ones."""
    found: dict[tuple[str, Versions], Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        content = json.loads(line)
        record = Record(**content | {"versions": Versions(**content["versions"])})
        found[record.test, record.versions] = record
    return list(found.values())
