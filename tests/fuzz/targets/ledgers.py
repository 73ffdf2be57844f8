"""Events of a ledger, as the trainer writes them."""

from __future__ import annotations

from typing import Any

_PARTS = {"startup": 4.0, "restore": 1.0, "productive": 40.0, "dataWait": 1.0, "lost": 2.0}
EVENTS: list[dict[str, Any]] = [
    {"time": 1.7e9, "event": "attempt-started", "attempt": 1, "jobVersion": "a"},
    {
        "time": 1.7e9 + 5,
        "event": "generation-started",
        "attempt": 1,
        "generation": 1,
        "worldSize": 2,
        "step": 0,
        "restoredFrom": None,
        "stepsLost": 0,
        "secondsLost": 0.0,
        "planSeconds": 1.0,
    },
    {"time": 1.7e9 + 20, "event": "committed", "generation": 1, "step": 10, "seconds": 1.5, "stallSeconds": 0.1},
    {"time": 1.7e9 + 30, "event": "waiting", "attempt": 1, "slots": 1},
    {"time": 1.7e9 + 40, "event": "failure", "attempt": 1, "cause": "workerLost", "step": 12, "message": "lost"},
    {
        "time": 1.7e9 + 50,
        "event": "generation-ended",
        "generation": 1,
        "worldSize": 2,
        "seconds": 45.0,
        "steps": 12,
        "parts": _PARTS,
    },
    {"time": 1.7e9 + 55, "event": "replaced", "seconds": 5.0},
    {"time": 1.7e9 + 56, "event": "attempt-ended", "attempt": 1, "exitCode": None, "lastSeen": 1.7e9 + 55},
    {"time": 1.7e9 + 57, "event": "job-changed"},
    {"time": 1.7e9 + 58, "event": "adopted", "generation": 1},
    {"time": 1.7e9 + 60, "event": "stopped"},
    {"time": 1.7e9 + 99, "event": "finished", "attempt": 1, "step": 20},
]
