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

[The fault suite](faults.md) and [that of serving](serving-faults.md) inject one fault at a time.
Here, training jobs and a service run at once on the same nodes, and meet many faults that overlap.
A schedule injects 20 or 40 faults in two to five minutes, most of them before everything has
recovered from the one before. The seed and the numbers of jobs and faults determine what is hit,
when and for how long. Seeds draw from decks of all kinds, so consecutive seeds hit with every kind
before one is repeated.

One job, or two at once, train a tiny model on one to three CPU workers each, on a real Kubernetes
with KubeRay ([the test cluster](../tests/cluster/README.md)), and commit every 10 steps. They have
[`execution.reproducible: worldSize`](adr/0051-gradients-in-fixed-point.md), so their bits do not
depend on the number of workers. A step takes 0.8 s while faults are injected; after the last fault,
everything that was taken away is given back, and the rest of the 500 steps are made at full speed.

Beside them, a ModelService with a gateway, two replicas and a Redis answers three clients without
end. An answer has 96 tokens of a small Llama; half of them are greedy, the other half is sampled
with a seed. Replicas share their spot nodes with the jobs. A gateway holds its clients'
connections, so gateway, Redis and clients are on a node that no fault hits ([more on the
method](adr/0092-chaos-over-training-and-serving.md)).

The checker requires of every schedule:

- **Model.** The jobs are Complete, and the exported weights have the SHA-256 of an undisturbed run.
- **Samples.** Every step of every worker group, also of steps that were lost and made again, has the
  rows and the loss of that run. The steps that count are there once and in order, and each epoch has
  each row once.
- **Status of the jobs.** In every second of the run, `Ready` and `Training` are true only while steps
  are made, and the phase agrees with what runs. A status may be 30 s old, or for 30 s after an operator
  that was gone is back. Within a generation, the step never goes back. The loss shown is that of the
  step shown. What a stranger writes into the status is replaced.
- **Requests.** None fails. A request that was refused before its first text is sent again, as the
  `Retry-After` of the refusal says; an answer that has begun comes to its end. Every answer has the
  text of the same request without a fault, character by character.
- **Status of the service.** In every second, `Ready` is true only while text arrives, and false only
  while none does, again with 30 s for an old status.

Its [tests](../tests/cluster/chaos/test_checker.py) plant each of these violations in a correct
history, and it finds them. `make chaos REDUCE=7` reduces the schedule of a seed that fails to few
faults; [tests](../tests/cluster/chaos/test_schedules.py) run the short schedules from then on.
"""
_OLDER = (
    "Before, ten seeds of 20 faults were run over one job without a service. All passed, with 191 faults of 44 kinds "
    "([records](../benchmarks/results/chaos_one_job.jsonl)). They do not count here."
)
_MENDED = {
    5: "Ray kept a new pod reserved for a replica after the head that had asked for it was killed. The replica waited "
    "for ten minutes, until the run was given up. Since then, the operator replaces such a pod ([ADR "
    "99](adr/0099-a-pod-that-ray-does-not-use.md)), and the seed was run again.",
    9: "All pods were killed, and a new head was there within 16 seconds. The status said Training for another twelve "
    "seconds, by what the driver had written before. Since then, only what a driver writes after the start of the "
    "supervisor counts, and the seed was run again. An earlier run had passed but for a mistake of the checker, "
    "which left out statuses that a stranger had changed when it compared transitions.",
    22: "A job was resumed six seconds after its suspension. For seven seconds the status said Training, by the last "
    "poll of workers that were just stopping. Since then, such a job counts as Starting until a newer poll says "
    "otherwise, and the seed was run again.",
    25: "Again a job was resumed at once after its suspension, and the status said Training for nine seconds: until "
    "its workers had left, the supervisor said that it was running. Since then it says that it is stopping, and the "
    "seed was run again.",
    28: "All three requests that were open failed at the same moment, half a minute after the new head of the service "
    "was up, while the machine built other programs as well. No log was kept that says why. Ray Serve's new controller "
    "kills gateways that have not responded within 30 seconds, which fits. Now they have five minutes ([ADR "
    "100](adr/0100-gateways-outlive-a-new-controller.md)), logs are kept, and the seed was run again.",
    30: "Two heads were lost one after the other. The first replacement showed step 70 of the workers that trained on, "
    "the second one showed step 40, the last that a driver had written. Now it shows where the workers were, and the "
    "seed was run again.",
}
"""What seeds found in earlier runs, or in the newest, which the table has."""
_JOBS = (
    *("job", "steps", "made again", "groups", "workers", "restarts counted", "longest gap"),
    *("recovered after", "result"),
)
_SEEDS = (
    *("seed", "faults", "jobs", "requests", "failed", "other text", "sent again", "longest gap", "recovered after"),
    *("minutes", "commit", "result"),
)


def report(records: Sequence[ChaosRecord]) -> str:
    """Return the page as Markdown."""
    parts = [
        _TEXT,
        *_summary(records),
        "",
        *_wrapped(_OLDER),
        "",
        *_seeds(records),
        "",
        *_jobs(records),
        "",
        *_kinds(records),
        "",
    ]
    return "\n".join([*parts, *_findings(records), *_mended(records)]).rstrip() + "\n"


def _summary(records: Sequence[ChaosRecord]) -> Iterator[str]:
    if not records:
        yield "No seed has been run yet."
        return
    jobs = sum(len(record.jobs) for record in records)
    passed = sum(not record.findings for record in records)
    injected = sum(record.num_injected for record in records)
    faults = sum(record.num_faults for record in records)
    requests = sum(record.service.requests for record in records)
    failed = sum(record.service.failed for record in records)
    machines = sorted({record.machine for record in records})
    minutes = sum(record.seconds for record in records) / 60
    yield from _wrapped(
        f"**{passed} of {len(records)} seeds passed**, with {_count(injected, 'fault')} of {_used(records)} kinds over "
        f"{_count(jobs, 'job')}; {failed:,} of {requests:,} requests failed. "
        f"{' '.join(machines)} {minutes:.0f} minutes in total."
    )
    if injected < faults:
        yield ""
        yield from _wrapped(f"Another {faults - injected} faults found nothing to hit, because others had removed it.")


def _seeds(records: Sequence[ChaosRecord]) -> Iterator[str]:
    yield from _head(_SEEDS)
    for record in records:
        service = record.service
        yield _row(
            str(record.seed),
            f"{record.num_injected} of {record.num_faults}",
            str(len(record.jobs)),
            f"{service.requests:,}",
            str(service.failed),
            str(service.other_text),
            str(service.refused),
            f"{service.gap_seconds:.0f} s",
            f"{service.recovered_seconds:.0f} s",
            f"{record.seconds / 60:.1f}",
            record.commit,
            "passed" if not record.findings else f"**{_count(len(record.findings), 'finding')}**",
        )
    yield ""
    yield from _wrapped(
        "*Sent again* are requests that were refused before their first text, and answered later. *Longest gap* is the "
        "longest time between two texts of one stream; *recovered after* is the time from the recovery of the jobs "
        "until the service was Ready with all replicas."
    )


def _jobs(records: Sequence[ChaosRecord]) -> Iterator[str]:
    yield "## Jobs"
    yield ""
    yield from _head(_JOBS)
    for job in (job for record in records for job in record.jobs):
        yield _row(
            job.name,
            str(job.steps),
            str(job.steps_lost),
            str(job.generations),
            " → ".join(map(str, job.world_sizes)),
            ", ".join(f"{cause} {count}" for cause, count in job.restarts.items()) or "none",
            f"{job.gap_seconds:.0f} s",
            f"{job.recovered_seconds:.0f} s",
            "passed" if not job.findings else f"**{_count(len(job.findings), 'finding')}**",
        )
    yield ""
    yield from _wrapped(
        "A job's name has its seed. *Made again* are steps that were lost, *groups* starts of worker groups. *Longest "
        "gap* is the longest time between two steps while faults were injected; *recovered after* is the time from the "
        "last undone fault until the status showed a step that was never made before. Times are those of one machine "
        "that runs the whole cluster."
    )


def _head(names: Sequence[str]) -> tuple[str, str]:
    return _row(*names), "|---" * len(names) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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
            text = re.sub(r"\s+", " ", finding).replace("<", "&lt;").partition("; its status was")[0]
            yield from _wrapped(f"- Seed {record.seed}: {text}", indent="  ")


def _mended(records: Sequence[ChaosRecord]) -> Iterator[str]:
    found = {record.seed: _MENDED[record.seed] for record in records if record.seed in _MENDED}
    if not found:
        return
    if any(record.findings for record in records):
        yield ""
    yield "## Found and fixed"
    yield ""
    for seed, text in found.items():
        yield from _wrapped(f"- Seed {seed}: {text}", indent="  ")


def _used(records: Sequence[ChaosRecord]) -> int:
    return len({fault.kind for record in records for fault in record.faults if not fault.problem})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, PROSE_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
