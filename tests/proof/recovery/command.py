"""Runs recovery schedules and their negative controls on the real product, and writes docs/proof-recovery.md.

Usage:
    python -m tests.proof.recovery --seeds 101-300 --jobs 2

Every record is appended to a file at once, and seeds with a record are skipped, so several sittings complete the proof.
With `--gpus 2` each worker has a GPU, and a schedule has at most two workers; such records belong in a file of their
own, and `--page -` writes no page. On a machine without git, `--commit` names the tested commit. Exits with 1 if a
schedule is not proven or a control is not caught.

    python -m tests.proof.recovery --jobs 10 --minutes 8 --records $OUT/records.jsonl --page - --commit abc
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from tests import ROOT
from tests.proof.command import clear, seed_range
from tests.proof.negative_controls import ControlBench, control_job
from tests.proof.recovery import records
from tests.proof.recovery.controls import LIVE_CONTROLS, RANK_CONTROLS
from tests.proof.recovery.prover import RecoveryProver
from tests.proof.recovery.records import Records, RecoveryControlRecord, RecoveryRecord
from tests.proof.recovery.report import PAGE, RECORDS, report
from tests.proof.recovery.schedules import FIRST_SEED, LAST_SEED, MOST_WORKERS, make_schedule
from tests.proof.references import References
from tests.provenance import commit, machine
from tests.trainer.support.runs import Runs

_Record = RecoveryRecord | RecoveryControlRecord
_Task = Callable[[], _Record]


def main() -> int:
    """Run all schedules and controls without a record, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seed_range, default=range(FIRST_SEED, LAST_SEED + 1), help="as 101-300")
    parser.add_argument("--jobs", type=int, default=2, help="schedules in parallel")
    parser.add_argument("--again", action="store_true", help="run these seeds again, even if they have records")
    parser.add_argument("--without-controls", action="store_true", help="run schedules only")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this machine; 0: workers train on CPUs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further schedules after this time")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the records")
    parser.add_argument("--work", type=Path, default=ROOT / "build/proof-recovery", help="folder of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write; -: none")
    parser.add_argument("--commit", help="the tested commit, where there is no git")
    options = parser.parse_args()
    clear(options.work)
    device = machine()
    if options.gpus:
        device = f"{torch.cuda.get_device_name()}, {device}"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or ranks on CPUs would choose NCCL
    prover = RecoveryProver(Runs(options.work), options.commit or commit(), device, options.gpus > 0, _log)
    done = records.read(options.records)
    tasks = list(_schedules(prover, options.seeds, () if options.again else done.schedules, options.gpus))
    if not options.without_controls:
        tasks = [*_controls(prover, done), *tasks]
    for record in _run(tasks, options.jobs, options.minutes * 60):
        records.append(options.records, record)
    found = records.read(options.records)
    if str(options.page) != "-":
        options.page.write_text(report(found), encoding="utf-8")
    return int(not is_good(found))


def is_good(found: Records) -> bool:
    """Whether all schedules were proven and all controls caught."""
    proven = not any(record.findings for record in found.schedules)
    return proven and all(control.caught is not None for control in found.controls)


def _schedules(prover: RecoveryProver, seeds: range, done: Sequence[RecoveryRecord], gpus: int) -> Iterator[_Task]:
    """Yield a function for each schedule without a record; it returns the record."""
    recorded = {record.seed for record in done}
    for seed in seeds:
        if seed not in recorded:
            schedule = make_schedule(seed, min(MOST_WORKERS, gpus or MOST_WORKERS))
            yield lambda schedule=schedule: prover.prove(schedule)  # type: ignore[misc]


def _controls(prover: RecoveryProver, done: Records) -> Iterator[_Task]:
    recorded = {(record.control, record.live) for record in done.controls}
    bench = ControlBench(prover.runs, References(prover.runs, control_job(prover.runs)))
    for control in RANK_CONTROLS:
        if (control.name, False) not in recorded and not prover.gpus:
            yield lambda control=control: prover.check_control(control, bench)  # type: ignore[misc]
    for live in LIVE_CONTROLS:
        if (live.name, True) not in recorded:
            yield lambda live=live: prover.check_live_control(live)  # type: ignore[misc]


def _run(tasks: list[_Task], jobs: int, seconds: float) -> Iterator[_Record]:
    """Run tasks in parallel, and start none after some time; yields each record as soon as it is done."""
    durations: list[float] = []
    until = time.monotonic() + seconds

    def run_in_time(task: _Task) -> _Record | None:
        return task() if time.monotonic() < until else None

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_in_time, task) for task in tasks]
        for number, future in enumerate(as_completed(futures), start=1):
            record = future.result()
            if record is None:
                continue
            durations.append(record.seconds)
            left = statistics.mean(durations) * (len(tasks) - number) / jobs / 60
            _log(f"{number}/{len(tasks)} {_line(record)} (about {left:.0f} min left)")
            yield record


def _line(record: _Record) -> str:
    if isinstance(record, RecoveryControlRecord):
        return f"control {record.control}: " + (f"caught: {record.caught}" if record.caught else "NOT CAUGHT")
    verdict = "proven" if not record.findings else "NOT PROVEN: " + "; ".join(record.findings)
    kills = ", ".join(f"{kill.target} {kill.moment}{'' if kill.hit else ' [missed]'}" for kill in record.kills)
    return f"seed {record.seed}: {kills}; {record.seconds:.0f} s: {verdict}"


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
