"""What a supervisor needs of a Ray head, whether it starts that head itself or finds it running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient


class RayHead(Protocol):
    """A Ray head to submit drivers to: `LocalRay`, or `AttachedRay` in a cluster."""

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        """Take over the head that an earlier supervisor recorded; False where it no longer responds.

        Args:
            record: what `record` returned to that supervisor; None where there was none.
        """

    def start(self) -> None:
        """Start the head, or wait for it, until it can take drivers."""

    def is_alive(self) -> bool:
        """Whether its processes run; a cheap check that asks no API."""

    def is_responding(self) -> bool:
        """Whether its Jobs API answers now."""

    def client(self) -> JobsClient:
        """A client of its Jobs API."""

    def record(self) -> dict[str, Any] | None:
        """JSON values by which `reattach` finds the head again."""

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        """End the head and everything that runs in it, if it belongs to this supervisor.

        Args:
            spares_ranks: whether node agents and their ranks run on: another head follows, whose driver adopts them.
        """
