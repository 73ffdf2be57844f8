"""Run by every Python process of the workers, before anything else: the all-reduce of each step waits."""

import time
from typing import Any

from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

_STEP_SECONDS = 0.4


def _pause_in_each_step(loop: Any) -> None:
    fast = loop.distributed

    class PausingNetwork:
        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

        def all_reduce(self, *arguments: Any, **options: Any) -> Any:
            time.sleep(_STEP_SECONDS)
            return fast.all_reduce(*arguments, **options)

    loop.distributed = PausingNetwork()


after_import("spotune_trainer.training.loop", _pause_in_each_step)
