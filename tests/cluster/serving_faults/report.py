"""Writes docs/serving-faults.md: the result of every fault of the catalogue in the last `make serving-faults`.

Usage:
    python -m tests.cluster.serving_faults.report benchmarks/results/serving_faults.jsonl --output PAGE
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from docs.wrapping import wrap_page
from tests.cluster.fault_records import num_passed, result_cell, tested_commits
from tests.cluster.serving_faults.catalogue import CASES, GATEWAY_KILLED, OTHERS, TOKEN_DROPPED, TOKEN_REPEATED
from tests.cluster.serving_faults.records import Record, read_records

_TEXT = """# The fault suite of serving

`make serving-faults` writes this page from
[its records](../benchmarks/results/serving_faults.jsonl). Do not edit it.

Each test injects one fault into a ModelService on a real Kubernetes cluster with KubeRay
([tests/cluster](../tests/cluster/README.md)), while 220 clients in a pod of the cluster read
streams. The service has two gateways and two replicas on processors, and a Redis for Ray's cluster
state. Its model is a small Llama that the trainer has trained to count. Half of the streams are
greedy; the other half is sampled with a seed at temperature 1. An answer has {tokens} tokens. The clients
are the `openai` package with `max_retries=0`.

After every fault, the suite checks:

- **In mid-answer.** At least 200 streams had their first text, and not their last, when the fault
  was injected.
- **Failed.** No stream ended with an error, or without its end.
- **Other text.** Every text equals that of the same request without a fault, character by
  character.
- **Ready.** The service is Ready again with all replicas.
"""
_HEADINGS = (
    "fault",
    "in mid-answer",
    "continued elsewhere",
    "failed",
    "other text",
    "longest gap: median",
    "longest gap: maximum",
    "Ready after",
    "result",
)
_NOTES = """- *Continued elsewhere* counts how often a gateway sent a sequence to another replica.
- *Longest gap* is the longest time between two texts of one stream. The machine has two cores for
  the whole cluster and all clients, so a gap contains much waiting for a processor.
- *Ready after* is the time from the fault until `Ready` was true for good, with all replicas. It is
  empty if `Ready` never was false.{loading}
- Where none continued, the fault hit no running stream, and the row proves nothing about lost
  replicas.
- A commit is that of the checkout when the result was recorded. The pods run the code of when the
  cluster was started.
"""
_LOADING = """ A replica counted from when Ray Serve ran on its pod, and may
  still have been loading its model then: the time is a lower bound.
- The suite waited for `Ready`, and so did not know that every replica took requests before the next
  fault. Where as many streams continued as were in mid-answer, one replica probably had all of them."""


def report(records: Mapping[str, Record]) -> str:
    """Return the page as Markdown.

    Args:
        records: The results, by name of the fault.
    """
    names = [case.name for case in CASES]
    survived = [records[name] for name in names if name in records]
    machines = " ".join(sorted({record.machine for record in records.values()}))
    requests, failed, other = (sum(getattr(r, n) for r in survived) for n in ("requests", "failed", "other_text"))
    passed, tested = num_passed(records.values()), tested_commits(records.values())
    about = (
        f"**{passed} of {len(names) + len(OTHERS)} passed.** Under the faults of the first table, {failed} of "
        f"{requests:,} requests failed, and {other} had another text. Commit {tested}. {machines}"
    )
    page = "\n".join(
        [
            _TEXT.format(tokens=" or ".join(map(str, sorted({record.tokens for record in records.values()})))),
            about,
            "",
            *_table(names, records),
            "",
            _NOTES.format(loading="" if all(r.replicas_had_loaded for r in records.values()) else _LOADING),
            "## A lost gateway",
            "",
            "The gateway holds the connections, so its own streams end with an error that names the connection.",
            "110 streams ran over both gateways; 110 more requests began after the fault, by",
            "clients that send a request again if it was refused. All other streams were whole.",
            "",
            *_table([GATEWAY_KILLED], records),
            "",
            "## Controls",
            "",
            "The same checks notice a wrong gateway: here they have to fail for as many streams as continued.",
            "",
            *_table([TOKEN_REPEATED, TOKEN_DROPPED], records),
            "",
        ]
    )
    return wrap_page(page)


def _table(names: Sequence[str], records: Mapping[str, Record]) -> list[str]:
    rows = ["| " + " | ".join(_HEADINGS) + " |", "|---" * len(_HEADINGS) + "|"]
    return rows + ["| " + " | ".join(_row(name, records.get(name))) + " |" for name in names]


def _row(name: str, record: Record | None) -> Iterator[str]:
    yield name
    if record is None:
        yield from [""] * (len(_HEADINGS) - 2)
        yield "**not run**"
        return
    yield from map(str, (record.in_mid_answer, record.resumptions, record.failed, record.other_text))
    yield f"{record.gap_p50_seconds:.1f} s"
    yield f"{record.gap_max_seconds:.1f} s"
    yield "" if record.ready_seconds is None else f"{record.ready_seconds:.0f} s"
    yield result_cell(record)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="records of the suite (JSON lines)")
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    options = parser.parse_args()
    options.output.write_text(report(read_records(options.records)), encoding="utf-8")


if __name__ == "__main__":
    main()
