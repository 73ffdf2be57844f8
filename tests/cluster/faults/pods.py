"""Pods of a job that go, gracefully or at once."""

from tests.cluster.faults.harness import Scene


def worker_pod_deleted(scene: Scene) -> None:
    with scene.survives("workerLost", "preempted", loses=1):
        scene.delete(scene.job.pods("workers")[:1])


def head_pod_deleted(scene: Scene) -> None:
    with scene.survives("headLost"):
        scene.delete([scene.job.head()])


def head_and_one_worker_deleted_at_once(scene: Scene) -> None:
    with scene.survives("headLost", "workerLost", "preempted", loses=1):
        scene.delete([scene.job.head(), *scene.job.pods("workers")[:1]])


def every_pod_gone_at_once(scene: Scene) -> None:
    with scene.survives("headLost", "workerLost", loses=scene.job.workers):
        scene.delete([scene.job.head(), *scene.job.pods("workers")], "--force", "--grace-period=0")
