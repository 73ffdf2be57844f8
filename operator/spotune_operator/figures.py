"""The figures of a status: what the supervisor says of the training, and what the pods cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotune.job import FinetuneJobStatus, GpuSecondsStatus, LastCheckpointStatus, RestartsStatus
from spotune_operator.aims import Situation
from spotune_operator.children.raycluster import ON_DEMAND_GROUP
from spotune_operator.conditions import find, is_true
from spotune_operator.observed import Pod
from spotune_operator.timestamps import rfc3339, unix_time

_AS_SAID = {
    "totalSteps": "total_steps",
    "epoch": "epoch",
    "loss": "loss",
    "evalLoss": "eval_loss",
    "generation": "generation",
    "step": "step",
    "stepsLost": "steps_lost",
    "goodput": "goodput",
}
"""Fields of ``/progress`` and their names here; the last value stays while none is said."""
_WHILE_TRAINING = {"tokensPerSecond": "tokens_per_second", "mfu": "mfu"}
"""Fields that mean something only while steps are made."""


def training_figures(situation: Situation) -> dict[str, Any]:
    """Fields of the status, by their name in Python, that come from the supervisor; those that it did not say stay."""
    content = situation.reading.content
    said = {name: content[source] for source, name in _AS_SAID.items() if content.get(source) is not None}
    is_training = content.get("phase") == "Training" and not situation.unreachable
    rates = {name: content.get(source) if is_training else None for source, name in _WHILE_TRAINING.items()}
    left = content.get("etaSeconds") if is_training else None
    return {
        **said,
        **rates,
        "eta": rfc3339(situation.reading.at + left) if left is not None else "",
        "resumed_from_step": content.get("resumedFromStep") or situation.previous.resumed_from_step,
        "last_checkpoint": _last_checkpoint(content, situation.previous),
        "restarts": _restarts(content, situation.previous),
        **_progress(situation),
    }


def _last_checkpoint(content: Mapping[str, Any], previous: FinetuneJobStatus) -> LastCheckpointStatus | None:
    said = content.get("lastCheckpoint")
    return LastCheckpointStatus(step=said["step"], time=rfc3339(said["time"])) if said else previous.last_checkpoint


def _restarts(content: Mapping[str, Any], previous: FinetuneJobStatus) -> RestartsStatus:
    said: Mapping[str, int] = content.get("restarts") or {}
    if not said:
        return previous.restarts
    return RestartsStatus.model_validate({**said, "total": sum(said.values())})


def _progress(situation: Situation) -> dict[str, Any]:
    """The highest step, and since when nothing new was done; prepared data counts, and standing still does not."""
    previous, now = situation.previous, rfc3339(situation.now)
    step = situation.reading.content.get("step") or 0
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
    content, before = situation.reading.content, find(situation.previous.conditions, "DataPrepared")
    said = content.get("message")
    return content.get("phase") == "Preparing" and bool(said) and before is not None and before.message != said


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
