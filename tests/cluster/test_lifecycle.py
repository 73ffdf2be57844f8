"""A test cluster starts from any state, runs beside others, and leaves no trace on the machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import NAME
from spotune_testcluster.waiting import wait_for
from tests.cluster.host_state import difference, snapshot
from tests.cluster.pods import claim, pod, wait_until_running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CYCLES = int(os.environ.get("SPOTUNE_TEST_CYCLES", "3"))
SECONDS_TO_TIDY_UP = 15.0
TOOL = (sys.executable, "-m", "spotune_testcluster")
IMAGE = "testcluster.local/base:1"
OTHER = f"{NAME}-other"
SECOND = f"{NAME}-second"


@pytest.fixture(autouse=True)
def machine() -> None:
    if os.environ.get("SPOTUNE_TEST_KUBECONFIG"):
        pytest.skip("starts clusters on this machine, and another's was given")


@pytest.fixture
def other() -> Iterator[Cluster]:
    """A separate cluster for the test, removed afterwards."""
    found = Cluster(OTHER)
    found.down()
    yield found
    found.down()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*TOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def _use(cluster: Cluster) -> None:
    """Run a pod with a volume, so that mounts, loop devices, containers and addresses have to be removed."""
    kubectl = cluster.kubectl.within("default")
    kubectl.apply(claim("data", "300Mi", "shared"), pod("user", IMAGE, claims={"/data": "data"}))
    wait_until_running(kubectl, "user")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ups_and_downs_leave_the_machine_as_it_was(other: Cluster, took: dict[str, float]) -> None:
    """In every third cycle `up` is killed midway, and the next `up` has to handle the remains."""
    before = snapshot()
    seconds = []
    for cycle in range(CYCLES):
        if cycle % 3 == 1:
            _kill_in_the_middle(0.7 * cycle)
        start = time.monotonic()
        _run("up", "--name", OTHER, "--nodes", "1")
        seconds.append(time.monotonic() - start)
        if cycle % 3 == 0:
            _use(other)
        _run("down", "--name", OTHER)
        assert _left_behind(before) == {}
    took[f"up with 1 node, median of {CYCLES}"] = sorted(seconds)[CYCLES // 2]


def _left_behind(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """Differences to the earlier state, after a delay in which the kernel releases dead processes."""
    end = time.monotonic() + SECONDS_TO_TIDY_UP
    while (changed := difference(before, snapshot())) and time.monotonic() < end:
        time.sleep(0.5)
    return changed


def _kill_in_the_middle(after: float) -> None:
    started = subprocess.Popen(
        [*TOOL, "up", "--name", OTHER, "--nodes", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(after)
    started.send_signal(signal.SIGKILL)
    started.wait()


@pytest.mark.long
def test_up_twice_keeps_what_runs_and_adds_what_lacks(other: Cluster) -> None:
    _run("up", "--name", OTHER, "--nodes", "1")
    other.kubectl("create", "namespace", "kept")
    _run("up", "--name", OTHER, "--nodes", "2")
    assert other.nodes() == {"n1": True, "n2": True}
    other.kubectl("get", "namespace", "kept")


@pytest.mark.long
def test_up_after_a_crash_of_everything(other: Cluster) -> None:
    _run("up", "--name", OTHER, "--nodes", "0")
    for process in _processes_of(other):
        with contextlib.suppress(ProcessLookupError):  # ended with the first process of its namespace
            os.kill(process, signal.SIGKILL)
    wait_for("the end of it", 10, lambda: not other.is_running())
    _run("up", "--name", OTHER, "--nodes", "0")
    assert other.kubectl("get", "--raw=/readyz") == "ok"


@pytest.mark.long
def test_two_clusters_do_not_know_of_each_other(other: Cluster) -> None:
    second = Cluster(SECOND)
    try:
        _run("up", "--name", OTHER, "--nodes", "0")
        _run("up", "--name", SECOND, "--nodes", "0")
        other.kubectl("create", "namespace", "mine")
        assert "mine" not in second.kubectl("get", "namespaces")
        told = json.loads(_run("status", "--output", "json").stdout)
        assert {OTHER, SECOND} <= {cluster["name"] for cluster in told if cluster["running"]}
        second.down()
        assert other.kubectl("get", "--raw=/readyz") == "ok"
    finally:
        second.down()


def test_command_on_a_cluster_that_is_not_there_says_what_to_do() -> None:
    done = subprocess.run([*TOOL, "kubeconfig", "--name", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "spotune-testcluster up" in done.stderr


def _processes_of(cluster: Cluster) -> set[int]:
    procs = Path("/sys/fs/cgroup").rglob(f"{cluster.files.group}/cgroup.procs")
    return {int(line) for path in procs for line in path.read_text().split()}
