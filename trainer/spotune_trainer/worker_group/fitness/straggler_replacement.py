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
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.job_directory.ledger import Ledger

_READ_SECONDS = 5.0


class StragglerReplacement:
    """Decides for one worker group.

    Args:
        logs: its folder.
        planned_minimum: workers that the model needs, for `workers.min: auto`.
        ledger: of the job; has the last replacement.
        leave_out: leaves out the node of a rank, for a reason, if at least this number of workers remains; returns
            whether.
        clock: seconds, monotonic.
        now: unix time.
    """

    def __init__(
        self,
        logs: GenerationLogs,
        planned_minimum: int,
        ledger: Ledger,
        leave_out: Callable[[int, str, int], bool],
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._logs = logs
        self._planned_minimum = planned_minimum
        self._ledger = ledger
        self._leave_out = leave_out
        self._clock = clock
        self._now = now
        self._read = float("-inf")

    def reason(self, generation: int, workers: WorkersSpec) -> str | None:
        """Why the group of a generation is to leave now, after its slowest node was left out; None if it stays."""
        if workers.on_straggler != "replace" or self._clock() - self._read < _READ_SECONDS:
            return None
        self._read = self._clock()
        progress = files.read_json(self._logs.progress) or {}
        stragglers = sorted(progress.get("stragglers") or [], key=lambda each: -each["ratio"])
        if not stragglers or self._is_cooling_down(workers):
            return None
        slowest = stragglers[0]
        since = f"for {max(0.0, self._now() - slowest['since']) / 60:.0f} minutes"
        reason = f"rank {slowest['rank']} on {slowest['node']} took {slowest['ratio']:.2f} of the median {since}"
        minimum = self._planned_minimum if workers.min == "auto" else workers.min_world_size
        if not self._leave_out(slowest["rank"], f"straggler: {reason}", minimum):
            return None
        self._ledger.append("straggler-replaced", generation=generation, reason=reason, **slowest)
        return reason

    def _is_cooling_down(self, workers: WorkersSpec) -> bool:
        replaced = self._ledger.records("straggler-replaced")
        return bool(replaced) and self._now() - replaced[-1]["time"] < workers.resize_cooldown.seconds
