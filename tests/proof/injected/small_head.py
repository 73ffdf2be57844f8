"""Makes the local Ray head smaller than the job, so that further nodes have the other workers."""

from __future__ import annotations

from typing import Any

HEAD_SLOTS = "SPOTUNE_PROOF_HEAD_SLOTS"
"""Variable with the workers that the head has room for."""


def limit_head(slots: int) -> None:
    """From now on this process starts heads with so many slots."""
    from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

    def change(local: Any) -> None:
        make = local.LocalRay.__init__

        def make_small(self: Any, directory: Any, _: int, *, gpus: bool) -> None:
            make(self, directory, slots, gpus=gpus)

        local.LocalRay.__init__ = make_small

    after_import("spotune_trainer.supervisor.ray_head.local", change)
