"""A local Ray of one node, to which the process of the test is connected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants

from spotune_trainer.supervisor.ray_head import local as local_ray


@contextmanager
def connected_ray(folder: Path, slots: int) -> Iterator[local_ray.RunningRay]:
    """Start a Ray without a token (which has to be set before the import), and connect this process to it.

    Yields:
        Its address and its processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        environment = local_ray._environment
        patch.setattr(local_ray, "_environment", lambda *given: environment(*given) | {"RAY_AUTH_MODE": "disabled"})
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # as in that environment
        head = local_ray.LocalRay(folder, slots, gpus=False)
        head.start()
        assert head.running is not None
        try:
            ray.init(address=head.running.address, log_to_driver=False)
            yield head.running
        finally:
            ray.shutdown()
            head.shut_down()
