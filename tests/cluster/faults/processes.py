"""Processes and containers of a job that end without a word, or stand still."""

from tests.cluster.containers import kill_container, wait_for_restart
from tests.cluster.faults.harness import Scene

_RANK = "spotune-rank"


def worker_process_killed(scene: Scene) -> None:
    with scene.survives("workerLost"):
        _signal_worker(scene, "KILL")


def worker_process_hangs(scene: Scene) -> None:
    """As in a collective that never returns; `retry.hangTimeout` must be short."""
    with scene.survives("hang"):
        _signal_worker(scene, "STOP")


def ray_container_of_the_head_killed(scene: Scene) -> None:
    machine = scene.machine("kill -9 of a container")
    with scene.survives("headLost"):
        kill_container(machine, scene.job.head(), "ray-head")


def supervisor_killed(scene: Scene) -> None:
    machine = scene.machine("kill -9 of a container")
    with scene.survives():
        head = scene.job.head()
        kill_container(machine, head, "supervisor")
        wait_for_restart(scene.job.kubectl, head, "supervisor")


def _signal_worker(scene: Scene, signal: str) -> None:
    pod = scene.job.pods("workers")[0]["metadata"]["name"]
    scene.job.kubectl("exec", pod, "--container=ray-worker", "--", "pkill", f"-{signal}", _RANK)
