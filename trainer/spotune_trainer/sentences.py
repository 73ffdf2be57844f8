"""Figures and events of a run in words for people: durations, progress, and a sentence for each ledger event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """Seconds in the two largest units: `41 s`, `3 min 20 s`, `2 h 05 min`, `1 d 03 h`."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02d} h"


def progress(status: Mapping[str, Any]) -> str:
    """The figures of a status on one line; those that are not known are left out."""
    step, total, loss = status.get("step"), status.get("totalSteps"), status.get("loss")
    rate, eta = status.get("tokensPerSecond"), status.get("etaSeconds")
    parts = [
        f"step {step}/{total}" if total is not None else f"step {step}" if step is not None else None,
        f"loss {loss:.4f}" if loss is not None else None,
        f"{rate:,.0f} tokens/s" if rate is not None else None,
        f"{duration(eta)} left" if eta else None,
    ]
    return ", ".join(part for part in parts if part)


def restarts(status: Mapping[str, Any]) -> str:
    """Restarts by cause, without those that never happened: `3 (workerLost 2, hang 1)`."""
    counts = {cause: count for cause, count in (status.get("restarts") or {}).items() if count}
    causes = ", ".join(f"{cause} {count}" for cause, count in counts.items())
    return f"{sum(counts.values())} ({causes})" if counts else "0"


def startup(parts: Mapping[str, float]) -> str:
    """Where the time until the first step went: `start-up: ray 4.3 s, submit 1.2 s, ...`."""
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"start-up: {listed}"


def sentence(event: Mapping[str, Any]) -> str | None:
    """What a ledger event means, or None for those that people need not see."""
    say = _SENTENCES.get(str(event["event"]))
    return say(event) if say else None


def _attempt_started(event: Mapping[str, Any]) -> str | None:
    return f"attempt {event['attempt']} starts" if event["attempt"] > 1 else None


def _attempt_ended(event: Mapping[str, Any]) -> str | None:
    if event["exitCode"] is None:
        return f"attempt {event['attempt']} is gone without an exit code"
    return None if event["exitCode"] == 0 else f"attempt {event['attempt']} ended with exit code {event['exitCode']}"


def _generation_started(event: Mapping[str, Any]) -> str:
    origin = f"from step {event['step']}" if event.get("restoredFrom") else "from the beginning"
    lost = f", {event['stepsLost']} steps to do again" if event.get("stepsLost") else ""
    how = f"ZeRO-{event['zeroStage']}, micro-batch {event['microBatchSize']}"
    return f"{event['worldSize']} worker(s) start {origin}{lost} ({how})"


def _committed(event: Mapping[str, Any]) -> str:
    return f"committed step {event['step']} ({event['bytes'] / 1e6:,.0f} MB in {event['seconds']:.1f} s)"


def _failure(event: Mapping[str, Any]) -> str:
    return f"failure at step {event['step']} ({event['cause']}): {event['message']}"


def _evaluated(event: Mapping[str, Any]) -> str:
    figures = {
        "loss": _number(event.get("loss"), ".4f"),
        "exact match": _number(event.get("exactMatch"), ".1%"),
        "execution accuracy": _number(event.get("executionAccuracy"), ".1%"),
    }
    known = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
    return f"evaluation after step {event['step']}: {known}"


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else ""


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "attempt-started": _attempt_started,
    "attempt-ended": _attempt_ended,
    "generation-started": _generation_started,
    "checkpoint-skipped": lambda event: f"checkpoint {event['checkpoint']} is passed over: {event['reason']}",
    "committed": _committed,
    "failure": _failure,
    "evaluated": _evaluated,
    "exported": lambda _: "the model is exported",
    "superseded": lambda _: "a later generation of this job runs",
    "notice": lambda event: f"stopped at step {event['step']}, as asked",
}
