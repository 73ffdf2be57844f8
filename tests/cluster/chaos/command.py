"""Runs training jobs and a service under schedules of overlapping faults on the test cluster, and writes docs/chaos.md.

Usage:
    python -m tests.cluster.chaos --seeds 1-25 --output docs/chaos.md
    python -m tests.cluster.chaos --reduce 7
    python -m tests.cluster.chaos --schedule tests/cluster/chaos/schedules/seed-7.json

Every record is stored at once, and the same command goes on after the last one. Exits with 1 if a schedule has
findings.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import NODES, ClusterUnderTest
from tests import ROOT
from tests.cluster import finetune_jobs, operator_install
from tests.cluster.chaos import records, schedule
from tests.cluster.chaos.chaos_run import ChaosBench
from tests.cluster.chaos.records import ChaosRecord
from tests.cluster.chaos.reduction import reduced
from tests.cluster.chaos.report import report
from tests.cluster.chaos.schedule import ChaosSchedule, PlannedFault, make_schedule
from tests.cluster.chaos.serving.service import service_under_chaos

RECORDS = ROOT / "benchmarks/results/chaos.jsonl"
SCHEDULES = Path(__file__).parent / "schedules"
"""Short schedules that once failed; tests run them."""
_NAME = os.environ.get("SPOTUNE_TESTCLUSTER", "chaos")
_IMAGE = "testcluster.local/trainer:1"
_STORAGE_CLASS = "shared"
_ATTEMPTS = 2
"""How often a shorter schedule is run until it counts as passed."""

logger = logging.getLogger("spotune.chaos")


def main() -> int:
    """Run all schedules without a record, and write the page."""
    options = _options()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(logging.INFO)
    if options.reduce is not None:
        return _reduce(make_schedule(options.reduce, options.faults, options.jobs), options.work)
    if options.schedule is not None:
        with _bench(options.work) as bench:
            return int(bool(_run(bench, schedule.from_json(options.schedule.read_text())).findings))
    done = set() if options.again else records.schedules_of(records.read(options.records))
    seeds = [seed for seed in options.seeds if (seed, options.faults, options.jobs) not in done]
    if seeds:
        with _bench(options.work) as bench:
            for seed in seeds:
                records.append(options.records, _run(bench, make_schedule(seed, options.faults, options.jobs)))
    found = records.read(options.records)
    if options.output is not None:
        options.output.write_text(report(found), encoding="utf-8")
    return int(any(record.findings for record in found if record.seed in options.seeds))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_range, default=range(1, 26), help="first and last, as 1-25")
    parser.add_argument("--faults", type=int, default=schedule.FAULTS, help="number of faults of each schedule")
    parser.add_argument("--jobs", type=int, default=schedule.JOBS, help="number of jobs of each schedule")
    parser.add_argument("--again", action="store_true", help="run these seeds again, even if they have records")
    parser.add_argument("--reduce", type=int, metavar="SEED", help="find a short schedule that fails as this one")
    parser.add_argument("--schedule", type=Path, help="run a schedule that was kept, without a record")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the records")
    parser.add_argument("--work", type=Path, default=ROOT / "build/chaos", help="folder of the artifacts")
    parser.add_argument("--output", type=Path, help="the page to write")
    return parser.parse_args()


def _run(bench: ChaosBench, planned: ChaosSchedule) -> ChaosRecord:
    """Run one schedule, and log what came of it."""
    shutil.rmtree(bench.folder / f"seed-{planned.seed}", ignore_errors=True)
    logger.info("seed %d: %d faults", planned.seed, len(planned.faults))
    record = bench.run(planned)
    verdict = "passed" if not record.findings else "; ".join(record.findings)
    logger.info("seed %d: %.0f s: %s", record.seed, record.seconds, verdict)
    return record


def _reduce(planned: ChaosSchedule, work: Path) -> int:
    """Write a short schedule that still fails, to be run by a test from then on; returns 1 if it does not fail."""
    with _bench(work) as bench:

        def fails(faults: Sequence[PlannedFault]) -> bool:
            return bool(_run(bench, planned.with_faults(faults)).findings)

        if not fails(planned.faults):
            logger.info("seed %d does not fail", planned.seed)
            return 1
        short = planned.with_faults(reduced(planned.faults, fails, attempts=_ATTEMPTS))
    path = SCHEDULES / f"seed-{planned.seed}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(schedule.to_json(short))
    logger.info("%s: %d faults", path, len(short.faults))
    return 0


@contextmanager
def _bench(work: Path) -> Iterator[ChaosBench]:
    """A cluster with operator and service, brought up for the block and removed afterwards."""
    machine = Cluster(_NAME)
    machine.down()
    work.mkdir(parents=True, exist_ok=True)
    for folder in work.glob("undisturbed-*"):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        machine.up(NODES, report=logger.info)
        cluster = ClusterUnderTest(machine.kubectl, machine, _IMAGE, _STORAGE_CLASS, [node.name for node in NODES])
        with bench_on(cluster, work) as bench:
            yield bench
    finally:
        machine.down()


@contextmanager
def bench_on(cluster: ClusterUnderTest, work: Path) -> Iterator[ChaosBench]:
    """A bench on a cluster without an operator."""
    with (
        operator_install.installed(cluster) as operator,
        operator.with_values("serving.enabled=true"),
        finetune_jobs.workplace(cluster) as workplace,
        service_under_chaos(workplace) as service,
    ):
        yield ChaosBench(cluster, operator, workplace, service, work)


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
