"""Run by every Python process of the workers, before anything else: the all-reduce of each step waits.

It no longer waits once there is a file `at-full-speed` beside this one.
"""

import os
import time
from pathlib import Path
from typing import Any

from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

_STEP_SECONDS = float(os.environ.get("SPOTUNE_TEST_STEP_SECONDS", "0.4"))
_AT_FULL_SPEED = Path(__file__).with_name("at-full-speed")


def _pause_in_each_step(loop: Any) -> None:
    fast = loop.distributed

    class PausingNetwork:
        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

        def all_reduce(self, *arguments: Any, **options: Any) -> Any:
            if not _AT_FULL_SPEED.exists():
                time.sleep(_STEP_SECONDS)
            return fast.all_reduce(*arguments, **options)

    loop.distributed = PausingNetwork()


after_import("spotune_trainer.training.loop", _pause_in_each_step)
