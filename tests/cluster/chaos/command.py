"""Runs training jobs under schedules of overlapping faults on the test cluster, and writes docs/chaos.md.

Usage:
    python -m tests.cluster.chaos --seeds 1-10 --faults 20 --output docs/chaos.md

Every record is stored at once, and the same command goes on after the last one. Exits with 1 if a schedule has
findings.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import NODES, ClusterUnderTest
from tests import ROOT
from tests.cluster import finetune_jobs, operator_install
from tests.cluster.chaos import records
from tests.cluster.chaos.chaos_run import ChaosBench
from tests.cluster.chaos.report import report
from tests.cluster.chaos.schedule import ChaosSchedule, make_schedule

RECORDS = ROOT / "benchmarks/results/chaos.jsonl"
_NAME = os.environ.get("SPOTUNE_TESTCLUSTER", "chaos")
_IMAGE = "testcluster.local/trainer:1"
_STORAGE_CLASS = "shared"

logger = logging.getLogger("spotune.chaos")


def main() -> int:
    """Run all schedules without a record, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_range, default=range(1, 11), help="first and last, as 1-10")
    parser.add_argument("--faults", type=int, default=20, help="number of faults of each schedule")
    parser.add_argument("--again", action="store_true", help="run these seeds again, even if they have records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of the records")
    parser.add_argument("--work", type=Path, default=ROOT / "build/chaos", help="folder of the artifacts")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(logging.INFO)
    done = set() if options.again else records.schedules_of(records.read(options.records))
    schedules = [make_schedule(seed, options.faults) for seed in options.seeds if (seed, options.faults) not in done]
    if schedules:
        _run(schedules, options.records, options.work)
    found = records.read(options.records)
    if options.output is not None:
        options.output.write_text(report(found), encoding="utf-8")
    return int(any(record.findings for record in found if record.seed in options.seeds))


def _run(schedules: list[ChaosSchedule], path: Path, work: Path) -> None:
    """Run schedules one after the other, on a cluster that is brought up for them and removed afterwards."""
    machine = Cluster(_NAME)
    machine.down()
    work.mkdir(parents=True, exist_ok=True)
    for schedule in schedules:  # what explains the findings of other seeds stays
        for folder in (work / f"seed-{schedule.seed}", *work.glob(f"undisturbed-chaos-{schedule.seed}-*")):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        machine.up(NODES, report=logger.info)
        nodes = [node.name for node in NODES]
        cluster = ClusterUnderTest(machine.kubectl, machine, _IMAGE, _STORAGE_CLASS, nodes)
        with operator_install.installed(cluster) as operator, finetune_jobs.workplace(cluster) as workplace:
            for schedule in schedules:
                logger.info("seed %d: %d faults", schedule.seed, len(schedule.faults))
                record = ChaosBench(cluster, operator, workplace, work).run(schedule)
                records.append(path, record)
                verdict = "passed" if not record.findings else "; ".join(record.findings)
                logger.info("seed %d: %.0f s: %s", record.seed, record.seconds, verdict)
    finally:
        machine.down()


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
