"""Timeouts of collectives, longer than that of the watchdog.

The watchdog logs the stacks of a hung rank and ends it with a clear reason. A collective that times out first hides the
cause. NCCL aborts the process after ten minutes, in the groups that DeepSpeed creates, and the rank then looks lost.
gloo raises an error that looks like a broken connection.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_MARGIN_SECONDS = 60.0


def extend_timeouts(hang_timeout_seconds: float, *groups: Any) -> None:
    """Set the timeout of these process groups' next collectives to the watchdog's timeout plus one minute.

    It calls a method of each backend: `torch.distributed.set_timeout` does not exist in the oldest supported torch.
    """
    timeout = timedelta(seconds=hang_timeout_seconds + _MARGIN_SECONDS)
    for group in groups:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
