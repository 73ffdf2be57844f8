"""Fuzzes every parser until each has had its time, and writes docs/fuzzing.md.

Usage:
    python -m tests.fuzz --minutes 60 --output docs/fuzzing.md
    python -m tests.fuzz --minutes 3 --only job --only checkpoint

Each turn is recorded at once, and the same command goes on where it was stopped. Exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import tests.environment  # noqa: F401 - before libraries that read it
from tests import ROOT
from tests.fuzz.records import read_records, seconds_of
from tests.fuzz.report import write_page
from tests.fuzz.runner import run_for
from tests.fuzz.targets import TARGETS

_NAMES = [target.name for target in TARGETS]


def main() -> int:
    """Run what has not had its time, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of each parser, with those of earlier runs")
    parser.add_argument("--only", action="append", choices=_NAMES, metavar="NAME", help=f"of {', '.join(_NAMES)}")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/fuzz.jsonl")
    parser.add_argument("--work", type=Path, default=ROOT / "build/fuzz", help="for hypothesis' database, and failures")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.ERROR)
    logging.getLogger("spotune.fuzz").setLevel(logging.INFO)
    sound = True
    for target in TARGETS:
        left = options.minutes * 60 - seconds_of(read_records(options.records), target.name)
        if left > 0 and (not options.only or target.name in options.only):
            sound = run_for(target, left, options.records, options.work) and sound
    if options.output is not None:
        options.output.write_text(write_page(read_records(options.records), TARGETS), encoding="utf-8")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
