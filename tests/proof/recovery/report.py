"""Writes docs/proof-recovery.md: the result of every recovery schedule and of its negative controls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests import ROOT
from tests.proof.recovery.records import KillRecord, Records, RecoveryControlRecord, RecoveryRecord
from tests.proof.recovery.schedules import (
    COMMIT_EVERY,
    FIRST_SEED,
    LAST_SEED,
    RECOVERY_MOMENTS,
    STEPS,
    Moment,
    Target,
)
from tests.proof.report import control_table, some_findings

PAGE = ROOT / "docs/proof-recovery.md"
RECORDS = ROOT / "benchmarks/results/proof_recovery.jsonl"
_TEXT = f"""# The proof of recovery

`make proof-recovery` writes this page from
[its records](../benchmarks/results/proof_recovery.jsonl). Do not edit it. The code is in
[tests/proof/recovery](../tests/proof/recovery).

[The proof](proof.md) shows that single faults do not change the result of training. Here, kills hit
a run while it recovers from an earlier loss, or while nodes copy a commit to one another, so that
the state comes from the node's own memory, from a peer's memory, or from the volume
([ADR 52](adr/0052-commits-stay-in-memory.md), [ADR 59](adr/0059-commits-are-copied-to-another-node.md)).

Each schedule runs the whole product: `spotune run` with its supervisor, Ray, driver, and CPU workers
on one to three nodes of one machine. The workers train a tiny T5 in fp32 with dropout for {STEPS} steps
and commit every {COMMIT_EVERY}. Each commit is copied to the next node. All kills are SIGKILL. A killed node is
replaced, and a killed command is started again. A lost node of the head is a lost agent with its
ranks: Ray's head lives on.

- *Both holders of a file* are a node and the one that keeps the copies of its commits.
- *Everything* is the command, Ray's head, and all nodes.
- A schedule that resizes changes its number of workers with its nodes, and asks for the same bits at
  any world size (`execution.reproducible: worldSize`).

To be hit, recoveries are a little slower than they would be: a rank waits up to 0.15 s before some
parts of its start, content is sent in chunks of 4 KiB, and the volume is as slow as a network
volume.

The checker of the proof judges each run: rows of every step, losses and exported weights are equal
bit for bit to those of an undisturbed run; no superseded or damaged checkpoint was used; every
failure has an expected cause; the command exited with 0, and left no process, file or memory behind.
"""
_CONTROLS = """## Negative controls

Memory holds other bytes than those that were committed, and a defect believes them. The checker must
find it. The tests also check that the intact trainer, which finds the same bytes in memory, reads
another copy instead, if need be in another worker group, and has no findings.

- "ranks": a real worker group without Ray resumes from a checkpoint.
- "product": the whole product runs with the defect, and a rank or a node is killed.
"""
_SOURCES = {"memory": "own memory", "peer": "a peer's memory", "volume": "the volume"}


def report(found: Records) -> str:
    """Return the page as Markdown."""
    schedules, controls = found.schedules, found.controls
    sections = [
        _TEXT,
        *_summary(schedules, controls),
        "",
        *_kinds(schedules),
        "",
        *_coverage(schedules),
        "",
        *_rows(schedules),
        "",
        *control_table(_CONTROLS, controls),
    ]
    return "\n".join(sections)


def _summary(schedules: Sequence[RecoveryRecord], controls: Sequence[RecoveryControlRecord]) -> Iterator[str]:
    proven = sum(not record.findings for record in schedules)
    caught = sum(control.caught is not None for control in controls)
    planned = LAST_SEED - FIRST_SEED + 1
    yield f"**{proven} of {len(schedules)} schedules proven, {caught} of {len(controls)} controls caught.**"
    if len(schedules) < planned:
        yield f"{planned - len(schedules)} of the {planned} schedules have not run yet."
    records: list[RecoveryRecord | RecoveryControlRecord] = [*schedules, *controls]
    for what, values in (
        ("Commit", (each.commit for each in records)),
        ("Machine", (each.machine for each in records)),
    ):
        tested = " and ".join(f"{value.removesuffix('.')} ({count})" for value, count in Counter(values).most_common())
        yield f"{what} {tested}."
    seconds = sum(record.seconds for record in records)
    yield f"{seconds / 60:.0f} minutes in total, one run at a time."
    yield ""
    kills = [kill for record in schedules for kill in record.kills]
    yield (
        f"{len(kills)} kills, {sum(record.generations for record in schedules)} worker group starts, "
        f"{sum(record.steps_lost for record in schedules)} repeated steps."
    )
    yield from _sources(schedules)


def _sources(schedules: Sequence[RecoveryRecord]) -> Iterator[str]:
    """How many groups read from each kind of holder, and how many bytes."""
    restores = [restore for record in schedules for restore in record.restores]
    read = [(source, [getattr(restore, name) for restore in restores]) for name, source in _SOURCES.items()]
    parts = [f"{sum(map(bool, values))} read from {source} ({sum(values) / 1e6:.1f} MB)" for source, values in read]
    mixed = sum(sum(map(bool, (each.memory, each.peer, each.volume))) > 1 for each in restores)
    yield f"Of {len(restores)} groups that restored a commit, {', '.join(parts)}; {mixed} read from several of these."


def _kinds(schedules: Sequence[RecoveryRecord]) -> Iterator[str]:
    """In how many schedules what the proof is about has happened."""
    kinds: dict[str, Callable[[RecoveryRecord], bool]] = {
        "a kill during a recovery": lambda record: _has(record, lambda kill: kill.moment in RECOVERY_MOMENTS),
        "a kill during the copy of a commit": lambda record: _has(record, lambda kill: kill.moment == Moment.COPY),
        "a kill while a rank read from a peer": lambda r: _has(r, lambda kill: kill.moment == Moment.PEER_READ),
        "both holders of a file lost": lambda record: _has(record, lambda kill: kill.target == Target.HOLDERS),
        "the driver killed during a recovery, a copy or a read": lambda r: _has(r, _is_driver_meanwhile),
        "a recovery from own memory": lambda record: any(each.memory for each in record.restores),
        "a recovery from a peer's memory": lambda record: any(each.peer for each in record.restores),
        "a recovery from the volume": lambda record: any(each.volume for each in record.restores),
        "the world size changed": lambda record: len(record.world_sizes) > 1,
    }
    yield "| schedules with | number |"
    yield "|---|---|"
    for name, happened in kinds.items():
        yield f"| {name} | {sum(map(happened, schedules))} |"


def _has(record: RecoveryRecord, matches: Callable[[KillRecord], bool]) -> bool:
    return any(kill.hit and matches(kill) for kill in record.kills)


def _is_driver_meanwhile(kill: KillRecord) -> bool:
    return kill.target == Target.DRIVER and kill.moment in (*RECOVERY_MOMENTS, Moment.COPY)


def _coverage(schedules: Sequence[RecoveryRecord]) -> Iterator[str]:
    """How often each target was hit at each moment."""
    kills = [kill for record in schedules for kill in record.kills]
    hits = Counter((kill.target, kill.moment) for kill in kills if kill.hit)
    yield "| killed | " + " | ".join(Moment) + " |"
    yield "|---" * (len(Moment) + 1) + "|"
    for target in Target:
        yield f"| {target} | " + " | ".join(str(hits[target, moment] or "") for moment in Moment) + " |"
    yield ""
    missed = sum(not kill.hit for kill in kills)
    yield f"In {missed} of {len(kills)} cases the moment had passed when the kill came: in brackets below, not counted."


def _rows(schedules: Sequence[RecoveryRecord]) -> Iterator[str]:
    yield "## Schedules"
    yield ""
    yield "Bytes that groups restored, in kB: own memory + peer + volume, for each group that restored."
    yield ""
    yield "| seed | ZeRO | nodes | copies | workers | kills (at step) | restored | steps lost | verdict |"
    yield "|---" * 9 + "|"
    for record in schedules:
        cells = (
            str(record.seed),
            str(record.zero_stage),
            " + ".join(map(str, record.nodes)),
            str(record.memory_copies),
            " → ".join(map(str, record.world_sizes)) + (", resizes" if record.resizes else ""),
            "; ".join(map(_kill, record.kills)),
            "; ".join(
                f"{each.memory / 1e3:.0f} + {each.peer / 1e3:.0f} + {each.volume / 1e3:.0f}" for each in record.restores
            ),
            str(record.steps_lost),
            "proven" if not record.findings else f"**not proven**: {some_findings(record.findings)}",
        )
        yield f"| {' | '.join(cells)} |"


def _kill(kill: KillRecord) -> str:
    return f"{kill.target} {kill.moment if kill.hit else f'[{kill.moment}]'} ({kill.step})"
