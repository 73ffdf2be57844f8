"""The fields of a status that come from the supervisor's progress."""

from __future__ import annotations

from typing import Any, Final

from spotune.job import BestStatus, FinetuneJobStatus, LastCheckpointStatus, QueueStatus, RestartsStatus
from spotune.units.timestamps import rfc3339
from spotune_operator.kube.conditions import find, is_true
from spotune_operator.observe.supervisor_status import ProgressResponse
from spotune_operator.observe.unfit_nodes import node_fields
from spotune_operator.reconcile.desired_state import ReconcileContext

_LAST_KNOWN: Final = (
    *("generation", "resumed_from_step", "step", "total_steps", "steps_lost", "goodput"),
    *("eval_loss", "eval_scores", "eval_step"),
)
"""Fields that keep their last value while the response has none."""
_WHILE_TRAINING: Final = ("tokens_per_second", "mfu")
"""Fields that are set only during training."""


def training_fields(context: ReconcileContext) -> dict[str, Any]:
    """The fields that come from the supervisor, by their name in Python; without a value, the previous one stays."""
    if context.is_outdated:
        return _progress(context)
    progress = context.progress
    is_training = context.is_active and progress.phase == "Training"
    left = progress.eta_seconds if is_training else None
    return {
        **{name: _rounded(value) for name in _LAST_KNOWN if (value := getattr(progress, name)) is not None},
        **_of_step(progress),
        **{name: _rounded(getattr(progress, name)) if is_training else None for name in _WHILE_TRAINING},
        "eta": rfc3339(context.poll.requested_at + left) if left is not None else "",
        "best": _best(progress, context.previous),
        "last_checkpoint": _last_checkpoint(progress, context.previous),
        "restarts": _restarts(progress, context.previous.restarts),
        **node_fields(progress, context.previous),
        **_progress(context),
    }


def _of_step(progress: ProgressResponse) -> dict[str, Any]:
    """Epoch and loss of the step that is shown; None if the workers went back to a step and have not made it again."""
    if progress.step is None:
        return {}
    return {"epoch": _rounded(progress.epoch), "loss": _rounded(progress.loss)}


def _rounded(value: Any) -> Any:
    """A float with five significant digits, because ``kubectl get`` shows all digits; others unchanged."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _best(progress: ProgressResponse, previous: FinetuneJobStatus) -> BestStatus | None:
    found = progress.best
    if found is None:
        return previous.best
    return BestStatus(step=found.step, metric=found.metric, value=_rounded(found.value))


def _last_checkpoint(progress: ProgressResponse, previous: FinetuneJobStatus) -> LastCheckpointStatus | None:
    newest = progress.last_checkpoint
    if newest is None:
        return previous.last_checkpoint
    return LastCheckpointStatus(step=newest.step, time=rfc3339(newest.time))


def _restarts(progress: ProgressResponse, previous: RestartsStatus) -> RestartsStatus:
    before = previous.model_dump(by_alias=False, exclude={"total"})
    counts: dict[str, int] = before | progress.restarts.model_dump(by_alias=False, exclude_none=True)
    return RestartsStatus(total=sum(counts.values()), **counts)


def _progress(context: ReconcileContext) -> dict[str, Any]:
    """The highest step, and the time of the last progress: a new step, more prepared data, or a resumed job."""
    previous, now = context.previous, rfc3339(context.now)
    step = context.progress.step or 0
    if step > previous.highest_step:
        return {"highest_step": step, "last_progress_time": now}
    has_progressed = previous.last_progress_time is None or _is_resumed(context) or _prepares_more_data(context)
    return {"last_progress_time": now if has_progressed else previous.last_progress_time}


def _is_resumed(context: ReconcileContext) -> bool:
    """Whether a suspended or ended job runs again."""
    if context.must_pause or context.outcome is not None:
        return False
    conditions = context.previous.conditions
    suspended = find(conditions, "Suspended")
    was_suspended = suspended is not None and suspended.status != "False"
    return was_suspended or is_true(conditions, "Complete") or is_true(conditions, "Failed")


def _prepares_more_data(context: ReconcileContext) -> bool:
    """Whether the message about the preparation of data has changed since the last reconcile."""
    progress, before = context.progress, find(context.previous.conditions, "DataPrepared")
    return (
        progress.phase == "Preparing"
        and bool(progress.message)
        and before is not None
        and before.message != progress.message
    )


def queue_status(context: ReconcileContext) -> QueueStatus | None:
    """What the job asks its queue for; it stays while the workers are released."""
    request = context.queue_request
    return QueueStatus(workers=request.workers, since=rfc3339(request.since)) if request is not None else None
