"""The display of a run: lines, panel and summary."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console, RenderableType

from spotune_trainer.supervisor.console import LiveView, PlainView, panel, summary

STATUS: dict[str, Any] = {
    "phase": "Training",
    "step": 120,
    "totalSteps": 480,
    "loss": 1.23456,
    "evalLoss": 1.5,
    "tokensPerSecond": 12345.6,
    "etaSeconds": 200.0,
    "workers": {"running": 2, "wanted": 3},
    "lastCheckpoint": {"step": 100, "time": time.time() - 65},
    "restarts": {"workerLost": 2, "hang": 1, "appError": 0},
    "message": None,
}


class Plain:
    """A plain view with recorded lines and an artificial clock."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.view = PlainView(self.lines.append, lambda: self.now)


def rendered(what: RenderableType) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_plain_view_writes_a_line_every_few_seconds_while_stepping() -> None:
    plain = Plain()
    for step in range(120):
        plain.now = step / 10
        plain.view.show({**STATUS, "step": step})
    assert plain.lines == [
        "Training: step 0/480, loss 1.2346, 12,346 tokens/s, 3 min 20 s left",
        "Training: step 50/480, loss 1.2346, 12,346 tokens/s, 3 min 20 s left",
        "Training: step 100/480, loss 1.2346, 12,346 tokens/s, 3 min 20 s left",
    ]


def test_plain_view_writes_a_change_of_phase_at_once() -> None:
    plain = Plain()
    plain.view.show({"phase": "Loading", "step": None, "message": None})
    plain.view.show({"phase": "Training", "step": None, "message": None})
    plain.view.show({"phase": "Training", "step": None, "message": None})
    assert plain.lines == ["Loading", "Training"]


def test_plain_view_writes_a_message_once() -> None:
    plain = Plain()
    waiting = {**STATUS, "phase": "WaitingForWorkers", "message": "1 of 2 workers are there"}
    for _ in range(3):
        plain.view.show(waiting)
    assert plain.lines.count("1 of 2 workers are there") == 1


def test_plain_view_does_not_repeat_an_events_message() -> None:
    plain = Plain()
    plain.view.log("failure at step 4 (workerLost): rank 1 was killed")
    plain.view.show({**STATUS, "message": "rank 1 was killed"})
    assert sum("rank 1 was killed" in line for line in plain.lines) == 1


def test_panel_shows_the_state_of_a_run() -> None:
    account = {"goodput": 0.5, "goodputParts": {"productive": 60.0, "waiting": 60.0}}
    text = rendered(panel("t5-wikisql", {**STATUS, **account, "message": "a worker was lost"}))
    expected = "t5-wikisql|Training|step 120/480|loss 1.2346|12,346 tokens/s|3 min 20 s left|2/3|step 100, "
    goodput = "50.0 % (waiting for capacity 1 min 00 s)"
    for part in (*expected.split("|"), goodput, "3 (workerLost 2, hang 1)", "a worker was lost"):
        assert part in text, part


def test_panel_of_a_run_that_has_not_stepped_yet() -> None:
    text = rendered(panel("job", {"phase": "Preparing"}))
    assert "Preparing" in text
    assert "none yet" in text


def test_live_view_prints_events_above_the_panel() -> None:
    console = Console(width=100, record=True, force_terminal=True, file=io.StringIO())
    with LiveView(console, "job") as view:
        view.show(STATUS)
        view.log("committed step 100")
    assert "committed step 100" in console.export_text()


def test_summary_omits_unknown_values() -> None:
    figures = {
        "steps": 1480,
        "executionAccuracy": 0.625,
        "scores": {"bleu": 41.25},
        "wallSeconds": 330.0,
        "mfu": None,
        "export": "/runs/a/export",
    }
    account = {"goodput": 0.9, "goodputParts": {"productive": 297.0, "startup": 33.0}}
    text = rendered(summary("job", {**figures, **account}))
    for part in ("job is trained", "1,480", "62.5%", "41.25", "5 min 30 s", "90.0 % (start-up 33 s)", "/runs/a/export"):
        assert part in text, part
    assert "MFU" not in text


def test_summary_shows_throughput_time_and_restarts() -> None:
    result = {
        "steps": 10,
        "samples": 150,
        "tokens": 40_960,
        "labelTokens": 12_288,
        "tokensPerSecond": 2048.0,
        "mfu": 0.414,
        "wallSeconds": 20.0,
        "restarts": 2,
        "goodput": 0.9,
        "goodputParts": {},
    }
    lines = [line.split(maxsplit=1) for line in rendered(summary("job", result)).splitlines()[1:]]
    assert [line[0] for line in lines] == [
        "steps",
        "samples",
        "tokens",
        "tokens/s",
        "MFU",
        "wall",
        "restarts",
        "goodput",
    ]
    values = [line[1].strip() for line in lines]
    assert values[:5] == ["10", "150", "40,960", "2,048", "41.4%"]
    assert (values[5].split()[1:], values[6]) == (["20", "s"], "2")
