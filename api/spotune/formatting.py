"""Formats durations, progress, scores, goodput and restarts for display, in the trainer and in the commands."""

from collections.abc import Mapping
from typing import Any

from spotune.goodput import Part

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_OTHER_PARTS = {
    Part.EVALUATION: "evaluation and export",
    Part.DATA_WAIT: "waiting for data",
    Part.CHECKPOINT_STALL: "checkpoints",
    Part.RESTORE: "restoring",
    Part.LOST: "lost work",
    Part.STARTUP: "start-up",
    Part.WAITING: "waiting for capacity",
    Part.STOPPED: "stopped",
}
_SHARES = {"exactMatch": "exact match", "executionAccuracy": "execution accuracy"}


def duration(seconds: float) -> str:
    """Seconds in the two largest units: ``41 s``, ``3 min 20 s``, ``2 h 05 min``, ``1 d 03 h``."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02d} h"


def progress(status: Mapping[str, Any]) -> str:
    """Step, loss, throughput and remaining time of a status on one line, without unknown values.

    Args:
        status: A mapping with the keys of ``status.json``; ``etaSeconds`` is the remaining time.
    """
    step, total, loss = status.get("step"), status.get("totalSteps"), status.get("loss")
    rate, eta = status.get("tokensPerSecond"), status.get("etaSeconds")
    parts = [
        f"step {step}/{total}" if total is not None else f"step {step}" if step is not None else None,
        f"loss {loss:.4f}" if loss is not None else None,
        f"{rate:,.0f} tokens/s" if rate is not None else None,
        f"{duration(eta)} left" if eta else None,
    ]
    return ", ".join(part for part in parts if part)


def scores_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The known scores by metric name.

    Args:
        record: An ``evaluated`` event or ``result.json``.
    """
    scores = {name: record.get(name) for name in _SHARES} | (record.get("scores") or {})
    return {name: float(score) for name, score in scores.items() if score is not None}


def score(metric: str, value: float) -> tuple[str, str]:
    """Display name and value of a metric: built-in scores as a percentage, all others as a plain number."""
    return (_SHARES[metric], f"{value:.1%}") if metric in _SHARES else (metric, f"{value:.4g}")


def evaluation(loss: float | None, scores: Mapping[str, float]) -> str:
    """The results of an evaluation on one line: ``loss 0.4231, exact match 71.2%, bleu 0.4312``."""
    parts = [f"loss {loss:.4f}"] if loss is not None else []
    return ", ".join([*parts, *(" ".join(score(metric, value)) for metric, value in scores.items())])


def goodput(share: float | None, parts: Mapping[str, float]) -> str:
    """Goodput, and the parts that took more than 0.1 % of the time: ``93.1 % (lost work 41 s, start-up 12 s)``.

    Args:
        share: Productive time over wall clock, 0 to 1; None if unknown.
        parts: Seconds by part, with the keys of ``status.json``.
    """
    if share is None:
        return ""
    least = sum(parts.values()) / 1000
    others = {name: parts.get(part, 0.0) for part, name in _OTHER_PARTS.items()}
    longest = sorted((name for name in others if others[name] > least), key=lambda name: -others[name])
    listed = ", ".join(f"{name} {duration(others[name])}" for name in longest)
    return f"{100 * share:.1f} % ({listed})" if listed else f"{100 * share:.1f} %"


def restarts(counts: Mapping[str, int]) -> str:
    """Total and restarts by cause, without causes that never occurred: ``3 (workerLost 2, hang 1)``."""
    happened = {cause: count for cause, count in counts.items() if count}
    causes = ", ".join(f"{cause} {count}" for cause, count in happened.items())
    return f"{sum(happened.values())} ({causes})" if happened else "0"
