"""Writes docs/faults.md and docs/bucket-faults.md: the result of every fault of a catalogue in the last run.

Usage:
    python -m tests.cluster.faults.report benchmarks/results/faults.jsonl --output docs/faults.md
    python -m tests.cluster.faults.report benchmarks/results/bucket_faults.jsonl --bucket --output docs/bucket-faults.md
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.fault_records import num_passed, result_cell, tested_commits
from tests.cluster.faults.bucket_catalogue import BUCKET_CASES, TWO_WRITERS
from tests.cluster.faults.catalogue import CASES
from tests.cluster.faults.records import Record, read_records
from tests.provenance import machine

TEXT = """# The fault suite

`make faults` writes this page. Do not edit it.

Each test injects one fault into a training job on a real Kubernetes cluster with KubeRay
([tests/cluster](../tests/cluster/README.md)). The job trains a tiny model on two CPU workers, and
commits every 20 steps. Its pods meet the restricted Pod Security Standard. [Chaos](chaos.md) injects
faults that overlap.

For every job that ends with a model, the suite checks:

- **Weights.** The exported weights have the SHA-256 of an undisturbed run of the same spec.
- **Samples.** Every step trained on the same rows as in that run, and counts once (hash over the
  rows that went through backward).
- **Status.** Every status was correct. Phases come in order, counters never decrease, and
  conditions follow the rules of `metav1`. `Ready` and `Training` are never true while no steps are
  made; a status may lag by up to 30 s.
- **Restarts.** The status counts exactly the restarts that the fault caused, by cause.
"""
BUCKET_TEXT = """# Faults of jobs in a bucket

`make bucket-faults` writes this page. Do not edit it.

Each test injects one fault into a training job whose only storage is a bucket
([how-to](how-to/bucket.md#on-kubernetes)): no pod shares a volume with another one, except for a
read-only one with model and data. The S3 server is moto, in a pod that no fault hits. Cluster, jobs
and checks are those of [the fault suite](faults.md): weights, samples, status and restarts.
"""
_HEADINGS = (
    "fault",
    "also checked",
    "restarts counted",
    "detected after",
    "first new step after",
    "longest pause of steps",
    "result",
)


ROWS = [(case.name, case.asserted) for case in CASES]
BUCKET_ROWS = [
    *((case.name, case.asserted) for case in BUCKET_CASES),
    (TWO_WRITERS, "the older job stops and waits; nothing that it writes afterwards is read"),
]


def report(cases: Sequence[tuple[str, str]], records: Mapping[str, Record], machine: str, text: str = TEXT) -> str:
    """Return the page as Markdown.

    Args:
        cases: Name of each fault, and what is also checked.
        records: Their results, by name of the fault.
        machine: The machine and date of the run.
        text: What the page begins with.
    """
    rows = ["| " + " | ".join(_HEADINGS) + " |", "|---" * len(_HEADINGS) + "|"]
    rows += ["| " + " | ".join(_row(name, asserted, records.get(name))) + " |" for name, asserted in cases]
    passed, tested = num_passed(records.values()), tested_commits(records.values())
    missing = sum(name not in records for name, _ in cases)
    later = f" {missing} of the {len(cases)} faults have not been injected yet." if missing else ""
    about = f"**{passed} of {len(cases) - missing} passed.**{later} Commit {tested}. {machine}"
    times = (
        "Times are those of a tiny model on one machine that runs the whole cluster. Use them only to compare faults\n"
        "with each other."
    )
    return "\n".join([text, about, "", *rows, "", times, ""])


def _row(name: str, asserted: str, record: Record | None) -> Iterator[str]:
    yield name
    yield asserted
    if record is None:
        yield from ("", "", "", "", "**not run**")
        return
    yield ", ".join(f"{cause} {count}" for cause, count in record.restarts.items()) or "none"
    yield _seconds(record.detect_seconds)
    yield _seconds(record.new_step_seconds)
    yield "" if record.longest_gap_seconds is None else f"{record.longest_gap_seconds:.1f} s"
    yield result_cell(record)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="records of the suite (JSON lines)")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    parser.add_argument("--bucket", action="store_true", help="the page of jobs in a bucket")
    options = parser.parse_args()
    cases, text = (BUCKET_ROWS, BUCKET_TEXT) if options.bucket else (ROWS, TEXT)
    options.output.write_text(report(cases, read_records(options.records), machine(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
