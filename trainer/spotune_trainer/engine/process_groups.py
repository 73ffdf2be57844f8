"""Collectives that do not give up before the hang guard does.

One that gives up by itself leaves no stacks, and its end is taken for something else: NCCL aborts the process, which
then looks lost, after ten minutes in the groups that DeepSpeed makes; gloo raises what looks like a broken connection.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_MARGIN_SECONDS = 60.0


def outlast(hang_timeout_seconds: float, *groups: Any) -> None:
    """Let these process groups wait a minute longer than the guard, in what they begin from now on.

    By the method of the backends, since `torch.distributed.set_timeout` is younger than the oldest torch that will do.
    """
    timeout = timedelta(seconds=hang_timeout_seconds + _MARGIN_SECONDS)
    for group in groups:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
