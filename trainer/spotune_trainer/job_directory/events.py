"""Reads the events of a ledger, and checks the types of what decisions depend on.

Anybody who can write to the volume can edit the ledger. A wrong value is named with file and event, instead of an error
somewhere in the driver. Fields that an event lacks are noticed where they are needed, by `files.reading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spotune_trainer.files import LineReader, UnreadableFileError

_MAX_NUMBER: Final = 1e15
"""More than any time in seconds, or any step; less than what floats round."""
_NUMBERS: Final = (
    *("time", "seconds", "step", "attempt", "generation", "worldSize", "stepsLost"),
    *("lastSeen", "planSeconds", "secondsLost"),
)


class EventReader(LineReader):
    """Reads the events that were added to a ledger since the last call, and checks them."""

    def read(self) -> list[dict[str, Any]]:
        """The new events.

        Raises:
            UnreadableFileError: an event has no name, or a value of another type than spotune writes.
        """
        events = super().read()
        for event in events:
            _check(self.path, event)
        return events


def _check(path: Path, event: Mapping[str, Any]) -> None:
    name = event.get("event")
    if not isinstance(name, str):
        raise _error(path, "an event has no name", event)
    for field in _NUMBERS:
        value = event.get(field)
        if value is not None and not _is_number(value):
            raise _error(path, f"the event {name!r:.50} has the {field} {value!r:.100}, which is not a number", event)
    parts = event.get("parts", {})
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise _error(path, f"the event {name!r:.50} has parts that are not seconds by name", event)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _MAX_NUMBER


def _error(path: Path, what: str, event: Mapping[str, Any]) -> UnreadableFileError:
    return UnreadableFileError(
        f"{path}: {what}, at the time {event.get('time')!r:.50}: the file was damaged, edited by hand, or written by "
        "another version of spotune"
    )
