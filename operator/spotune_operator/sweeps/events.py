"""Kubernetes Events of a sweep: for its conditions, for trials that start, are pruned or fail, and for the best one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spotune.sweep import SWEEP_KIND, FinetuneSweepStatus, TrialStatus
from spotune_operator.reconcile.events import Involved, condition_events, event_manifest
from spotune_operator.sweeps.caches import CachedSweep


def sweep_events(
    sweep: CachedSweep, previous: FinetuneSweepStatus, status: FinetuneSweepStatus, now: float
) -> Iterator[dict[str, Any]]:
    """The ``v1.Event``s for the difference of two statuses of a sweep.

    Args:
        sweep: The FinetuneSweep.
        previous: The status before.
        status: The status now.
        now: Unix time.
    """
    involved = Involved(SWEEP_KIND, sweep.namespace, sweep.name, sweep.uid)
    yield from condition_events(involved, previous.conditions, status.conditions, now)
    before = {trial.number: trial for trial in previous.trials}
    for trial in status.trials:
        earlier = before.get(trial.number)
        if earlier is None:
            message = f"trial {trial.name}: {_parameters(trial)}"
            yield event_manifest(involved, "TrialStarted", message, now, (trial.name,), warning=False)
        if trial.state in ("Pruned", "Failed") and (earlier is None or earlier.state != trial.state):
            reason, message = f"Trial{trial.state}", f"trial {trial.name}: {trial.message}"
            yield event_manifest(involved, reason, message, now, (trial.name,), warning=trial.state == "Failed")
    best, was = status.best, previous.best
    if best is not None and (was is None or was.number != best.number):
        message = f"trial {best.name} is the best so far: {best.value:.5g}"
        yield event_manifest(involved, "BestChanged", message, now, (best.name, str(best.value)), warning=False)


def _parameters(trial: TrialStatus) -> str:
    return ", ".join(f"{path}: {_shown(value)}" for path, value in sorted(trial.parameters.items()))


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
