"""The figures of a status: what the supervisor says of the training, and what the pods cost."""

from __future__ import annotations

from typing import Any, Final

from spotune.job import FinetuneJobStatus, GpuSecondsStatus, LastCheckpointStatus, RestartsStatus
from spotune_operator.children.raycluster import ON_DEMAND_GROUP
from spotune_operator.kube.conditions import find, is_true
from spotune_operator.kube.timestamps import rfc3339, unix_time
from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import Said
from spotune_operator.reconcile.desired_state import Situation

_AS_SAID: Final = (
    *("generation", "step", "total_steps", "epoch", "loss", "eval_loss", "eval_scores", "steps_lost", "goodput"),
)
"""Fields whose last value stays while none is said."""
_WHILE_TRAINING: Final = ("tokens_per_second", "mfu")
"""Fields that mean something only while steps are made."""


def training_figures(situation: Situation) -> dict[str, Any]:
    """Fields of the status, by their name in Python, that come from the supervisor; those that it did not say stay."""
    said = situation.reading.said
    is_training = situation.is_training and said.phase == "Training"
    left = said.eta_seconds if is_training else None
    return {
        **{name: _rounded(value) for name in _AS_SAID if (value := getattr(said, name)) is not None},
        **{name: _rounded(getattr(said, name)) if is_training else None for name in _WHILE_TRAINING},
        "eta": rfc3339(situation.reading.at + left) if left is not None else "",
        "resumed_from_step": said.resumed_from_step or situation.previous.resumed_from_step,
        "last_checkpoint": _last_checkpoint(said, situation.previous),
        "restarts": _restarts(said, situation.previous.restarts),
        **_progress(situation),
    }


def _rounded(value: Any) -> Any:
    """Five digits of what is not a whole number: a column of ``kubectl get`` shows them all."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _last_checkpoint(said: Said, previous: FinetuneJobStatus) -> LastCheckpointStatus | None:
    newest = said.last_checkpoint
    if newest is None:
        return previous.last_checkpoint
    return LastCheckpointStatus(step=newest.step, time=rfc3339(newest.time))


def _restarts(said: Said, previous: RestartsStatus) -> RestartsStatus:
    before = previous.model_dump(by_alias=False, exclude={"total"})
    counts: dict[str, int] = before | said.restarts.model_dump(by_alias=False, exclude_none=True)
    return RestartsStatus(total=sum(counts.values()), **counts)


def _progress(situation: Situation) -> dict[str, Any]:
    """The highest step, and since when nothing new was done; prepared data counts, and standing still does not."""
    previous, now = situation.previous, rfc3339(situation.now)
    step = situation.reading.said.step or 0
    if step > previous.highest_step:
        return {"highest_step": step, "last_progress_time": now}
    starts = previous.last_progress_time is None or _goes_on(situation) or _prepares(situation)
    return {"last_progress_time": now if starts else previous.last_progress_time}


def _goes_on(situation: Situation) -> bool:
    """Whether a job that stood still does so no longer."""
    if situation.job.spec.suspend or situation.outcome is not None:
        return False
    conditions = situation.previous.conditions
    suspended = find(conditions, "Suspended")
    stood = suspended is not None and suspended.status != "False"
    return stood or is_true(conditions, "Complete") or is_true(conditions, "Failed")


def _prepares(situation: Situation) -> bool:
    """Whether more data is prepared than at the last pass."""
    said, before = situation.reading.said, find(situation.previous.conditions, "DataPrepared")
    return said.phase == "Preparing" and bool(said.message) and before is not None and before.message != said.message


def gpu_seconds(situation: Situation) -> GpuSecondsStatus:
    """What was used so far: GPUs of running pods times the time since the last count.

    A pod counts from its containers' start to its end, as far as it was seen: one that came and went between two
    passes is missed.
    """
    previous = situation.previous.gpu_seconds
    counted = unix_time(previous.as_of)
    pods = [pod for pod in situation.seen.pods if pod.component == "workers" and pod.gpus and pod.started is not None]
    if not pods or (counted is not None and situation.now - counted < situation.settings.poll_seconds):
        return previous
    used = {True: previous.on_demand, False: previous.spot}
    for pod in pods:
        start = max(pod.started or 0.0, counted or 0.0)
        used[_is_on_demand(situation, pod)] += pod.gpus * max(0.0, situation.now - start)
    return GpuSecondsStatus(spot=round(used[False], 1), on_demand=round(used[True], 1), as_of=rfc3339(situation.now))


def _is_on_demand(situation: Situation, pod: Pod) -> bool:
    return pod.group == ON_DEMAND_GROUP or situation.job.spec.workers.capacity == "on-demand"
