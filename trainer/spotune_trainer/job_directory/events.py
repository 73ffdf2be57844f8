"""The events of a ledger that decisions depend on: the fields that each needs, checked when it is read.

Anybody who can write to the volume can edit the ledger. What is missing is named with file and event, instead of a
KeyError somewhere in the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spotune.retry import FailureCause
from spotune_trainer.files import LineReader, UnreadableFileError

_MAX_NUMBER: Final = 1e15
"""More than any time in seconds, or any step; less than what floats round."""
_NUMBERS: Final = ("seconds", "step", "attempt", "generation", "worldSize", "stepsLost", "time")
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "attempt-started": ("attempt",),
    "attempt-ended": ("attempt", "exitCode"),
    "generation-started": ("generation", "worldSize", "stepsLost"),
    "generation-ended": ("generation", "worldSize", "seconds"),
    "adopted": ("generation",),
    "failure": ("cause", "step", "message"),
    "committed": ("seconds",),
    "replaced": ("seconds",),
    "finished": ("step",),
}
_OPTIONAL_NUMBERS: Final = ("lastSeen", "planSeconds", "secondsLost")


class EventReader(LineReader):
    """Reads the events that were added to a ledger since the last call, and checks them."""

    def read(self) -> list[dict[str, Any]]:
        """The new events.

        Raises:
            UnreadableFileError: an event lacks a field, or a value has another type.
        """
        events = super().read()
        for event in events:
            _check(self.path, event)
        return events


def _check(path: Path, event: Mapping[str, Any]) -> None:
    name = event.get("event")
    if not isinstance(name, str):
        raise _error(path, "an event has no name", event)
    required = ("time", *_REQUIRED.get(name, ()))
    for field in required:
        if field not in event:
            raise _error(path, f"the event {name} has no {field}", event)
    for field in (*(each for each in required if each in _NUMBERS), *_OPTIONAL_NUMBERS):
        if event.get(field) is not None or field in required:
            _check_number(path, event, name, field)
    parts = event.get("parts", {})
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise _error(path, f"the event {name} has parts that are not seconds by name", event)
    if name == "failure" and event["cause"] not in list(FailureCause):
        raise _error(path, f"a failure has the unknown cause {event['cause']!r:.100}", event)


def _check_number(path: Path, event: Mapping[str, Any], name: str, field: str) -> None:
    if not _is_number(event[field]):
        raise _error(path, f"the event {name} has the {field} {event[field]!r:.100}, which is not a number", event)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value) and abs(value) < _MAX_NUMBER


def _error(path: Path, what: str, event: Mapping[str, Any]) -> UnreadableFileError:
    return UnreadableFileError(
        f"{path}: {what}, at the time {event.get('time')!r:.50}: the file was damaged, edited by hand, or written by "
        "another version of spotune"
    )
