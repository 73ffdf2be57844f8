"""Runs fault schedules and negative controls on the real product, and writes docs/proof.md.

Usage:
    python -m tests.proof --seeds 1-80 --jobs 2 --output docs/proof.md

Every record is stored at once. The same command resumes after the last record, unless the code has changed since.
Exits with 1 if a schedule is not proven or a control is not caught.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.proof import records
from tests.proof.injector import kill_leftovers
from tests.proof.negative_controls import CONTROL_JOBS, ControlBench
from tests.proof.prover import LIVE_CONTROLS, Prover, proof_job
from tests.proof.records import ControlRecord, Record, ScheduleRecord
from tests.proof.references import References
from tests.proof.report import report
from tests.proof.schedules import Data, make_schedule
from tests.provenance import commit, machine
from tests.trainer.support.runs import Runs

_BUILD = ROOT / "build"


def main() -> int:
    """Run all schedules and controls without a record, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seed_range, default=range(1, 81), help="first and last, as 1-80")
    parser.add_argument("--jobs", type=int, default=2, help="schedules in parallel")
    parser.add_argument("--again", action="store_true", help="run these seeds again, even if they have records")
    parser.add_argument("--records", type=Path, default=_BUILD / "proof.jsonl", help="file of the records")
    parser.add_argument("--work", type=Path, default=_BUILD / "proof", help="folder of the runs; failed runs are kept")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    done = records.drop_outdated(options.records, without=options.seeds if options.again else ())
    clear(options.work)
    runs = Runs(options.work)
    references = {data: References(runs, proof_job(runs, 0, 1, data=data)) for data in Data}
    prover = Prover(runs, references, commit(), _log)
    for record in _run(list(_tasks(prover, options.seeds, done)), options.jobs):
        records.append(options.records, record)
    found = records.read(options.records)
    if options.output is not None:
        options.output.write_text(report(found, machine()), encoding="utf-8")
    return int(any(not is_good(record) for record in found))


def is_good(record: Record) -> bool:
    """Whether a schedule was proven, or a control caught."""
    return not record.findings if isinstance(record, ScheduleRecord) else record.caught is not None


def _tasks(prover: Prover, seeds: range, done: list[Record]) -> Iterator[Callable[[], Record]]:
    """Yield a function for each schedule and control without a record; it returns the record."""
    controls = records.controls_of(done)
    for job, of_job in CONTROL_JOBS:
        bench = ControlBench(prover.runs, References(prover.runs, job(prover.runs)))
        for control in of_job:
            if (control.name, False) not in controls:
                yield lambda control=control, bench=bench: prover.check_control(control, bench)  # type: ignore[misc]
    for live in LIVE_CONTROLS:
        if (live.name, True) not in controls:
            yield lambda live=live: prover.check_live_control(live)  # type: ignore[misc]
    for seed in seeds:
        if seed not in records.seeds_of(done):
            yield lambda seed=seed: prover.prove_schedule(make_schedule(seed))  # type: ignore[misc]


def _run(tasks: list[Callable[[], Record]], jobs: int) -> Iterator[Record]:
    """Run tasks in parallel; yields each record as soon as it is done."""
    durations: list[float] = []
    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[Record]] = [pool.submit(task) for task in tasks]
        for number, future in enumerate(as_completed(futures), start=1):
            record = future.result()
            left = ""
            if isinstance(record, ScheduleRecord):
                durations.append(record.seconds)
                left = f" (about {statistics.mean(durations) * (len(tasks) - number) / jobs / 60:.0f} min left)"
            _log(f"{number}/{len(tasks)} {_line(record)}{left}")
            yield record


def _line(record: Record) -> str:
    if isinstance(record, ControlRecord):
        where = "in the product" if record.live else "without Ray"
        return f"control {where}: {record.control}: " + (f"caught: {record.caught}" if record.caught else "NOT CAUGHT")
    verdict = "proven" if not record.findings else "NOT PROVEN: " + "; ".join(record.findings)
    sizes = " -> ".join(str(size) for size in record.world_sizes)
    return f"seed {record.seed}: {len(record.blows)} faults, workers {sizes}, {record.seconds:.0f} s: {verdict}"


def clear(work: Path) -> None:
    """Kill the processes and remove the folders that a killed proof left behind."""
    for directory in work.glob("*.*/"):
        kill_leftovers(JobDirectory(directory))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)


def seed_range(text: str) -> range:
    """The seeds of a first and a last one, as 1-80."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
