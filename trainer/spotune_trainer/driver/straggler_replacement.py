"""Decides whether a worker group leaves the node of a straggler, with `workers.onStraggler: replace`.

The group commits and leaves as for a planned resize, so no step is lost. The node is left out from then on, like one
that has failed its check, and the group starts again on the others. That happens at most once per
`workers.resizeCooldown`, and never if fewer ready workers than the minimum would remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spotune.job import WorkersSpec
from spotune_trainer import files
from spotune_trainer.driver.resizing import RunningGroup
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import NodeAgents

_READ_SECONDS = 5.0


class StragglerReplacement:
    """Decides for one worker group.

    Args:
        group: the running one.
        ledger: of the job; has the last replacement.
        agents: on the nodes of the cluster.
        clock: seconds, monotonic.
        now: unix time.
    """

    def __init__(
        self,
        group: RunningGroup,
        ledger: Ledger,
        agents: NodeAgents,
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._agents = agents
        self._clock = clock
        self._now = now
        self._read = float("-inf")

    def reason(self, workers: WorkersSpec) -> str | None:
        """Why the group is to leave now, after its slowest node was left out; None if it stays."""
        if workers.on_straggler != "replace" or self._clock() - self._read < _READ_SECONDS:
            return None
        self._read = self._clock()
        progress = files.read_json(self._group.logs.progress) or {}
        stragglers = sorted(progress.get("stragglers") or [], key=lambda each: -each["ratio"])
        if not stragglers or self._is_cooling_down(workers):
            return None
        slowest = stragglers[0]
        since = f"for {max(0.0, self._now() - slowest['since']) / 60:.0f} minutes"
        reason = f"rank {slowest['rank']} on {slowest['node']} took {slowest['ratio']:.2f} of the median {since}"
        minimum = self._group.planned_minimum if workers.min == "auto" else workers.min_world_size
        if not self._agents.leave_out(slowest["rank"], f"straggler: {reason}", minimum):
            return None
        self._ledger.append("straggler-replaced", generation=self._group.generation, reason=reason, **slowest)
        return reason

    def _is_cooling_down(self, workers: WorkersSpec) -> bool:
        replaced = self._ledger.records("straggler-replaced")
        return bool(replaced) and self._now() - replaced[-1]["time"] < workers.resize_cooldown.seconds
