"""Faults of processes and containers: kills and hangs."""

from tests.cluster.containers import kill_container, wait_for_restart
from tests.cluster.faults.harness import FaultHarness

_RANK = "spotune-rank"


def worker_process_killed(harness: FaultHarness) -> None:
    with harness.expect_recovery("workerLost"):
        signal_worker(harness, "KILL")


def worker_process_hangs(harness: FaultHarness) -> None:
    """Stops a worker, as in a collective that never returns. Needs a short `retry.hangTimeout`."""
    with harness.expect_recovery("hang"):
        signal_worker(harness, "STOP")


def ray_container_of_the_head_killed(harness: FaultHarness) -> None:
    machine = harness.machine("kill -9 of a container")
    with harness.expect_recovery("headLost", continues=True):
        kill_container(machine, harness.job.head(), "ray-head")


def supervisor_killed(harness: FaultHarness) -> None:
    machine = harness.machine("kill -9 of a container")
    with harness.expect_recovery():
        head = harness.job.head()
        kill_container(machine, head, "supervisor")
        wait_for_restart(harness.job.kubectl, head, "supervisor")


def signal_worker(harness: FaultHarness, signal: str) -> None:
    """Send a signal to the ranks of one worker pod."""
    pod = harness.job.pods("workers")[0]["metadata"]["name"]
    harness.job.kubectl("exec", pod, "--container=ray-worker", "--", "pkill", f"-{signal}", _RANK)
