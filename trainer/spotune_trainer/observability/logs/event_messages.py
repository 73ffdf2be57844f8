"""Messages for users: one for each event of the ledger, and one for the time that the startup took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from spotune.formatting import evaluation, scores_of
from spotune_trainer.files import INVALID_CONTENT


def startup_message(parts: Mapping[str, float]) -> str:
    """Seconds by part until the first step: `start-up: ray 4.3 s, submit 1.2 s, ...`."""
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"start-up: {listed}"


def event_message(event: Mapping[str, Any]) -> str | None:
    """The message for a ledger event; None if users need not see it."""
    format_message = _MESSAGES.get(str(event["event"]))
    try:
        return format_message(event) if format_message else None
    except INVALID_CONTENT as error:
        # Messages are for people: an event of another version must not stop what shows it.
        return f"{event['event']} (its fields cannot be read: {type(error).__name__}: {error})"


def with_messages(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Each ledger event with its message, as of ``event_message``; nodes that joined together have one message."""
    previous: str | None = None
    for event in events:
        text = event_message(event)
        yield event, None if event["event"] == "joined" and text == previous else text
        previous = text


def _attempt_started(event: Mapping[str, Any]) -> str | None:
    return f"attempt {event['attempt']} starts" if event["attempt"] > 1 else None


def _attempt_ended(event: Mapping[str, Any]) -> str | None:
    if event["exitCode"] is None:
        return f"attempt {event['attempt']} was lost (no exit code)"
    return None if event["exitCode"] == 0 else f"attempt {event['attempt']} ended with exit code {event['exitCode']}"


def _prepared(event: Mapping[str, Any]) -> str:
    of_source = f" of source {event['source']}" if event["source"] else ""
    return f"data{of_source} is prepared: {event['summary']}"


def _generation_started(event: Mapping[str, Any]) -> str:
    origin = f"from step {event['step']}" if event.get("restoredFrom") else "from the beginning"
    lost = f", {event['stepsLost']} steps to repeat" if event.get("stepsLost") else ""
    user_code = event.get("function") or event.get("command")
    how = user_code or f"ZeRO-{event['zeroStage']}, micro-batch {event['microBatchSize']}"
    code = f", code {event['code'][:12]}" if event.get("code") else ""
    return f"{event['worldSize']} worker(s) start {origin}{lost} ({how}{code})"


def _committed(event: Mapping[str, Any]) -> str:
    return f"committed step {event['step']} ({event['bytes'] / 1e6:,.0f} MB in {event['seconds']:.1f} s)"


def _compiled(event: Mapping[str, Any]) -> str:
    return f"the first step waited {event['seconds']:.1f} s for the compiler ({event['start']} start)"


def _restored(event: Mapping[str, Any]) -> str | None:
    sources = {"memoryBytes": "memory", "peerBytes": "other nodes' memory", "volumeBytes": "the volume"}
    read = [f"{event[key] / 1e6:,.0f} MB from {source}" for key, source in sources.items() if event.get(key)]
    return f"restored step {event['step']}: {', '.join(read)}" if read else None


def _failure(event: Mapping[str, Any]) -> str:
    return f"failure at step {event['step']} ({event['cause']}): {event['message']}"


def _evaluated(event: Mapping[str, Any]) -> str:
    return f"evaluation after step {event['step']}: {evaluation(event.get('loss'), scores_of(event))}"


def _harness(event: Mapping[str, Any]) -> str:
    return f"lm-evaluation-harness after step {event['step']}: {evaluation(None, event['scores'])}"


def _exported(event: Mapping[str, Any]) -> str:
    return f"exported the model of step {event['step']}" if "step" in event else "exported the model"


def _leaving(event: Mapping[str, Any]) -> str:
    within = f" within {event['seconds']:.0f} s" if event["seconds"] is not None else ""
    why = f"; {event['why']}" if event.get("why") else ""
    return f"{event['reason']}: the workers commit and exit{within}{why}"


def _straggler(event: Mapping[str, Any]) -> str:
    return f"rank {event['rank']} on {event['node']} is slow: it takes {event['ratio']:.2f} of the median of all ranks"


_MESSAGES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "attempt-started": _attempt_started,
    "attempt-ended": _attempt_ended,
    "prepared": _prepared,
    "generation-started": _generation_started,
    "adopted": lambda event: f"{event['worldSize']} worker(s) have trained on without a driver, and continue",
    "checkpoint-skipped": lambda event: f"checkpoint {event['checkpoint']} is skipped: {event['reason']}",
    "compiled": _compiled,
    "restored": _restored,
    "committed": _committed,
    "failure": _failure,
    "step-skipped": lambda event: (
        f"step {event['step']} was skipped: its loss or gradient is not finite (samples {event['samples']})"
    ),
    "evaluated": _evaluated,
    "harness": _harness,
    "harness-failed": lambda event: str(event["reason"]),
    "stopped-early": lambda event: str(event["reason"]),
    "best-unusable": lambda event: str(event["reason"]),
    "exported": _exported,
    "leaving": _leaving,
    "growth-postponed": lambda event: f"{event['reason']}: {event['why']}",
    "joined": lambda event: f"a worker's node was ready to train {event['startSeconds']:.0f} s after it joined",
    "replaced": lambda event: f"a lost worker was replaced after {event['seconds']:.0f} s",
    "node-unfit": lambda event: f"node {event['node']} is unfit and is left out: {event['reason']}",
    "straggler": _straggler,
    "straggler-replaced": lambda event: f"the node of a straggler is replaced: {event['reason']}",
    "superseded": lambda _: "a later generation of this job is running",
    "job-changed": lambda event: f"the job changed: {', '.join(event['fields'])}",
    "notice": lambda event: f"stopped at step {event['step']}, as requested",
}
