"""Writes docs/chaos.md: the result of every schedule of `make chaos`, and how often each kind of fault was injected."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from docs.wrapping import PROSE_COLUMNS
from tests.cluster.chaos.records import ChaosRecord
from tests.cluster.chaos.schedule import FaultKind

_TEXT = """# Chaos

`make chaos` writes this page from [its records](../benchmarks/results/chaos.jsonl). Do not edit it. The
code is in [tests/cluster/chaos](../tests/cluster/chaos).

[The fault suite](faults.md) injects one fault into each job. Here, a job meets many that overlap: a
schedule injects 20 faults within a few minutes, most of them before the job has recovered from the
one before. What is hit, when and for how long is a pure function of the seed. Seeds draw from decks
of all kinds, so consecutive seeds hit with every kind before one is repeated.

The job trains a tiny model on one to three CPU workers, on a real Kubernetes with KubeRay ([the test
cluster](../tests/cluster/README.md)), and commits every 20 steps. It has [`execution.reproducible:
worldSize`](adr/0051-gradients-in-fixed-point.md), so its bits do not depend on the number of
workers. After the last fault, everything that was taken away is given back. Then the job, which has
no end until then, is suspended and applied again with 20 more steps ([more on the
method](adr/0060-chaos-is-judged-by-bits.md)).

The checker requires of every schedule:

- **Model.** The job is Complete, and the exported weights have the SHA-256 of an undisturbed run.
- **Samples.** Every step of every worker group, also of steps that were lost and made again, has the
  rows and the loss of that run. The steps that count are there once and in order, and each epoch has
  each row once.
- **Status.** In every second of the run, `Ready` and `Training` are true only while steps are made,
  and the phase agrees with what runs. A status may be 30 s old, or for 30 s after an operator that
  was gone is back. Within a generation, the step never goes back. The loss shown is that
  of the step shown. What a stranger writes into the status is replaced.

Its [tests](../tests/cluster/chaos/test_checker.py) plant each of these violations in a correct
history, and it finds them.
"""
_HEADINGS = (
    *("seed", "faults", "steps", "lost", "groups", "workers", "restarts counted", "longest gap"),
    *("recovered after", "result"),
)


def report(records: Sequence[ChaosRecord]) -> str:
    """Return the page as Markdown."""
    parts = [_TEXT, *_summary(records), "", *_schedules(records), "", *_kinds(records), "", *_findings(records)]
    return "\n".join(parts).rstrip() + "\n"


def _summary(records: Sequence[ChaosRecord]) -> Iterator[str]:
    passed = sum(not record.findings for record in records)
    injected = sum(record.num_injected for record in records)
    faults = sum(record.num_faults for record in records)
    commits = Counter(record.commit for record in records)
    tested = " and ".join(f"{commit} ({_count(count, 'seed')})" for commit, count in commits.most_common())
    machines = sorted({record.machine for record in records})
    minutes = sum(record.seconds for record in records) / 60
    yield from _wrapped(
        f"**{passed} of {len(records)} seeds passed**, with {injected} faults of {_used(records)} kinds. Commit "
        f"{tested or 'none'}. {' '.join(machines)} {minutes:.0f} minutes in total."
    )
    if injected < faults:
        yield ""
        yield from _wrapped(f"Another {faults - injected} faults found nothing to hit, because others had removed it.")


def _schedules(records: Sequence[ChaosRecord]) -> Iterator[str]:
    yield f"| {' | '.join(_HEADINGS)} |"
    yield "|---" * len(_HEADINGS) + "|"
    for record in records:
        cells = (
            str(record.seed),
            f"{record.num_injected} of {record.num_faults}",
            str(record.steps),
            str(record.steps_lost),
            str(record.generations),
            " → ".join(map(str, record.world_sizes)),
            ", ".join(f"{cause} {count}" for cause, count in record.restarts.items()) or "none",
            f"{record.gap_seconds:.0f} s",
            f"{record.recovered_seconds:.0f} s",
            "passed" if not record.findings else f"**{_count(len(record.findings), 'finding')}**",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _wrapped(
        "*Lost* are steps that were made again, *groups* starts of worker groups. *Longest gap* is the longest time "
        "between two steps while faults were injected; *recovered after* is the time from the last undone fault until "
        "the status showed a step that was never made before. Times are those of one machine that runs the whole "
        "cluster."
    )


def _kinds(records: Sequence[ChaosRecord]) -> Iterator[str]:
    injected = Counter(fault.kind for record in records for fault in record.faults if not fault.problem)
    missed = Counter(fault.kind for record in records for fault in record.faults if fault.problem)
    yield "## Faults"
    yield ""
    yield "| fault | injected | found nothing to hit |"
    yield "|---|---|---|"
    for kind in FaultKind:
        yield f"| {kind} | {injected[kind] or ''} | {missed[kind] or ''} |"


def _findings(records: Sequence[ChaosRecord]) -> Iterator[str]:
    if not any(record.findings for record in records):
        return
    yield "## Findings"
    yield ""
    for record in records:
        for finding in record.findings:
            text = re.sub(r"\s+", " ", finding).replace("<", "&lt;")
            yield from _wrapped(f"- Seed {record.seed}: {text}", indent="  ")


def _used(records: Sequence[ChaosRecord]) -> int:
    return len({fault.kind for record in records for fault in record.faults if not fault.problem})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, PROSE_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
