"""docs/faults.md: every fault of the catalogue, and what became of it in the last `make faults`.

Usage:
    python -m tests.cluster.faults.report build/faults.jsonl --output docs/faults.md
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.faults.catalogue import CASES, Case
from tests.cluster.faults.records import Record, read_records
from tests.provenance import machine

_TEXT = """# The fault suite

Written by `make faults`; not to be edited. Each fault hits a training job on a real Kubernetes with KubeRay
([tests/cluster](../tests/cluster/README.md)): a tiny model, two CPU workers that commit every 20 steps, pods of the
restricted standard.

Of every job that ends with a model is asserted:

- its exported weights have the SHA-256 of an undisturbed run of the same spec;
- every step was made on the same rows as there, each step once (hash over the rows that went through backward);
- nothing in its status was ever untrue: phases in order, counters that only grow, conditions by the rules of `metav1`,
  and never `Ready` or `Training` while no steps are made, but for the 30 s that a status may be old;
- the restarts in its status are those that the fault caused, by their causes.
"""
_HEADINGS = ("fault", "asserted besides", "restarts counted", "detected after", "first new step after", "result")


def report(cases: Sequence[Case], records: Mapping[str, Record], machine: str) -> str:
    """The page.

    Args:
        cases: All faults.
        records: What became of them, by name.
        machine: Where they were brought about, and when.
    """
    rows = ["| " + " | ".join(_HEADINGS) + " |", "|---" * len(_HEADINGS) + "|"]
    rows += ["| " + " | ".join(_row(case, records.get(case.name))) + " |" for case in cases]
    passed = sum(record.result == "passed" for record in records.values())
    commits = Counter(record.commit for record in records.values())
    tried = " and ".join(f"{commit} ({count} faults)" for commit, count in commits.most_common())
    about = f"{passed} of {len(cases)} passed, of commit {tried}. {machine}"
    times = "Times are of a tiny model on a machine that does everything at once: what they are good for is comparison."
    return "\n".join([_TEXT, about, "", *rows, "", times, ""])


def _row(case: Case, record: Record | None) -> Iterator[str]:
    yield case.name
    yield case.asserted
    if record is None:
        yield from ("", "", "", "**not run**")
        return
    yield ", ".join(f"{cause} {count}" for cause, count in record.restarts.items()) or "none"
    yield _seconds(record.detect_seconds)
    yield _seconds(record.new_step_seconds)
    yield "passed" if record.result == "passed" else f"**failed**: {_cell(record.result)}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="what the suite has written")
    parser.add_argument("--output", type=Path, required=True, help="the page")
    options = parser.parse_args()
    options.output.write_text(report(CASES, read_records(options.records), machine()), encoding="utf-8")


if __name__ == "__main__":
    main()
