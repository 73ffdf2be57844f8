"""The tests with other versions, and docs/support.md from their records.

    python -m tests.versions fast --python python3.12
    python -m tests.versions faults --python python3.13 --kubernetes 1.37
    python -m tests.versions page

`fast` runs the tests that need neither Ray, nor a cluster, nor rank processes. `faults` runs five faults of
`make faults` on a real Kubernetes. Both test the current commit in a clone below build/versions, and skip what has
passed: run a command that was stopped again. Each result is appended to benchmarks/results/versions.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spotune_testcluster import binaries
from tests import ROOT
from tests.versions import records, runs
from tests.versions.checkout import Checkout
from tests.versions.report import page

PAGE = ROOT / "docs/support.md"


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command; returns its exit code."""
    given = _parser().parse_args(arguments or sys.argv[1:])
    if given.action == "page":
        PAGE.write_text(page(records.read()), encoding="utf-8")
        return 0
    checkout = Checkout(given.python, given.ray)
    checkout.prepare()
    if given.action == "fast":
        passed = runs.run_fast(checkout, again=given.again)
    else:
        chosen = {"kubernetes": given.kubernetes, "kuberay": given.kuberay}
        passed = runs.run_faults(checkout, chosen, again=given.again)
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("fast", "faults", "page"))
    parser.add_argument("--python", default=sys.executable, help="path of a Python, or its command")
    parser.add_argument("--ray", default="", help="a version of Ray other than the pinned one")
    for name in binaries.CHOICES:
        known = ", ".join(sorted(each.parent.name for each in (binaries.SOURCES / name).glob("*/go.mod")))
        parser.add_argument(f"--{name}", default="", help=f"{known}; without it, the version of the test cluster")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    return parser
