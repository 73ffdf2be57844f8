"""When workers leave that the spec no longer asks for: not before the trainer knows that nobody wants them.

The job file reaches the head with a delay, since the kubelet updates ConfigMaps about once a minute. To a driver that
does not know of the change, a worker that leaves is a reclaimed one, for which it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import SupervisorResponse


def desired_count(status_workers: str) -> int | None:
    """The desired number of workers in ``status.workers``; None before the first."""
    desired = status_workers.rpartition("/")[2]
    return int(desired) if desired.isdecimal() and len(desired) < 10 else None  # anybody may edit a status


def present_count(count: int, before: int | None, workers: Sequence[Pod], *, is_unaware: bool) -> int:
    """The number of workers that are wanted for now.

    Args:
        count: ``workers.count``.
        before: The number of the last reconcile; None before the first.
        workers: The worker pods.
        is_unaware: Whether the trainer is at work and does not know the present spec. It learns of it soon.
    """
    present = sum(pod.deleting_since is None for pod in workers)
    return before if is_unaware and before is not None and count < before <= present else count


def is_unaware(supervisor: SupervisorResponse, job_file: str) -> bool:
    """Whether a supervisor will read the present job file, and has not done so yet.

    While attempts run, its message is why it refuses a file.
    """
    return supervisor.state == "running" and supervisor.job not in ("", job_file) and not supervisor.message
