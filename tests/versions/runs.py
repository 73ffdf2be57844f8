"""Runs the fast tests or five faults in a checkout with an environment of its own, and records the results."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from spotune_testcluster import binaries
from spotune_testcluster.home import Home
from tests.cluster.faults import control_plane, nodes, pods, processes
from tests.cluster.faults.catalogue import CASES
from tests.cluster.faults.records import VARIABLE
from tests.versions import records
from tests.versions.checkout import Checkout
from tests.versions.records import FAST, PASSED, Record, Versions

FAULTS = (
    processes.worker_process_killed,
    pods.head_pod_deleted,
    control_plane.operator_killed_at_random_moments,
    control_plane.api_server_restarted,
    nodes.node_of_the_head_crashed,
)
"""The quickest fault of each part: worker, head, operator, API server and node."""
CHOSEN = tuple(case for case in CASES if case.inject in FAULTS)
_MARKERS = "not cluster and not ray and not long and not slow"
_SHOWN = 3


def run_fast(checkout: Checkout, *, again: bool = False, path: Path = records.RECORDS) -> bool:
    """Run the fast tests in a checkout, unless they have passed with its versions; returns whether all have passed."""
    versions = Versions(checkout.version("python"), checkout.version("ray"))
    if not again and _has_passed(FAST, versions, path):
        return True
    results = checkout.folder / "build/fast.xml"
    options = ["-q", "-raR", "--reruns", "1", "-m", _MARKERS, f"--junitxml={results}"]
    seconds = _pytest(checkout, options, {})
    counts, failed = _outcomes(results)
    result = PASSED if not failed else f"failed: {', '.join(failed[:_SHOWN])}{' ...' if failed[_SHOWN:] else ''}"
    records.append(_record(checkout, FAST, versions, result, seconds, counts), path)
    return not failed


def run_faults(
    checkout: Checkout, chosen: Mapping[str, str], *, again: bool = False, path: Path = records.RECORDS
) -> bool:
    """Run five faults on a cluster with the chosen versions of Kubernetes and KubeRay ("": those of the test cluster).

    A fault that has passed with the same versions is skipped. Returns whether all have passed.
    """
    variables = {variable: chosen[name] for name, variable in binaries.CHOICES.items()}
    os.environ.update(variables)
    versions = _versions_of_cluster(checkout)
    cases = [case for case in CHOSEN if again or not _has_passed(case.name, versions, path)]
    found = checkout.folder / "build/faults.jsonl"
    found.parent.mkdir(exist_ok=True)
    found.unlink(missing_ok=True)
    slugs = [f"tests/cluster/faults/suite.py::test_job_survives[{case.slug}]" for case in cases]
    try:
        if slugs:
            _pytest(checkout, slugs, {VARIABLE: str(found), "SPOTUNE_TEST_REQUIRE_CLUSTER": "1"})
    finally:  # also after Ctrl-C
        for line in found.read_text().splitlines() if found.exists() else ():
            each = json.loads(line)
            if not each["result"].startswith("KeyboardInterrupt"):
                records.append(_record(checkout, each["fault"], versions, each["result"], each["wall_seconds"]), path)
    return all(_has_passed(case.name, versions, path) for case in CHOSEN)


def _versions_of_cluster(checkout: Checkout) -> Versions:
    """The versions of the programs that the chosen cluster runs; builds them if need be."""
    programs = binaries.build(Home.default().root, logging.getLogger(__name__).info)
    control_plane, node = (_last_word(programs / name, "--version") for name in ("kube-apiserver", "kubelet"))
    built_from = subprocess.run(
        ["go", "version", "-m", programs / "ray-operator"], capture_output=True, text=True, check=True
    )
    kuberay = re.search(rf"^\s+mod\s+{re.escape(binaries.OPERATOR)}\s+v(\S+)", built_from.stdout, re.MULTILINE)
    assert kuberay is not None, built_from.stdout[:500]
    return Versions(checkout.version("python"), checkout.version("ray"), control_plane, node, kuberay[1])


def _last_word(*command: str | Path) -> str:
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.split()[-1].removeprefix("v")


def _has_passed(test: str, versions: Versions, path: Path) -> bool:
    return any(record.passed and record.test == test and record.versions == versions for record in records.read(path))


def _pytest(checkout: Checkout, arguments: Sequence[str], variables: Mapping[str, str]) -> float:
    """Run pytest in the checkout; returns the seconds that it took."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.monotonic()
    command = [str(checkout.python), "-m", "pytest", *arguments]
    subprocess.run(command, cwd=checkout.folder, env={**environment, **variables}, check=False)
    return time.monotonic() - start


def _outcomes(results: Path) -> tuple[dict[str, int], list[str]]:
    """Number of tests by outcome, and the names of those that failed, in the XML that pytest writes."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    failed = []
    for case in ET.parse(results).getroot().iter("testcase"):
        is_failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if is_failed else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        if is_failed:
            failed.append(case.get("name", ""))
    return counts, failed


def _record(
    checkout: Checkout,
    test: str,
    versions: Versions,
    result: str,
    seconds: float,
    counts: Mapping[str, int] | None = None,
) -> Record:
    return Record(
        test=test,
        versions=versions,
        result=result,
        seconds=round(seconds, 1),
        commit=checkout.commit(),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        command=shlex.join(["python", "-m", "tests.versions", *sys.argv[1:]]),
        counts=dict(counts or {}),
    )
