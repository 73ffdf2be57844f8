"""Puts a broken worker in the place of the product's, in the processes of a live negative control."""

from __future__ import annotations

from typing import Any

BROKEN = "SPOTUNE_PROOF_BROKEN"
"""Variable that names a class of `tests.proof.broken_workers` or `tests.proof.broken_memory`."""


def break_worker(name: str) -> None:
    """From now on this process trains with the worker of that name."""
    from after_import import after_import  # type: ignore[import-not-found]  # found by its folder there

    def change(worker: Any) -> None:
        from tests.proof import broken_memory, broken_workers

        worker.Worker = vars(broken_workers).get(name) or getattr(broken_memory, name)

    after_import("spotune_trainer.training.worker", change)
