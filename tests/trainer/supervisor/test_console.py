"""What people see of a run: lines, panel and summary."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console, RenderableType

from spotune_trainer.observability.logs import event_messages as sentences
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
    """A plain view whose lines and clock are the test's."""

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


def test_plain_view_says_a_message_once() -> None:
    plain = Plain()
    waiting = {**STATUS, "phase": "WaitingForWorkers", "message": "1 of 2 workers are there"}
    for _ in range(3):
        plain.view.show(waiting)
    assert plain.lines.count("1 of 2 workers are there") == 1


def test_plain_view_does_not_repeat_what_an_event_has_said() -> None:
    plain = Plain()
    plain.view.say("failure at step 4 (workerLost): rank 1 was killed")
    plain.view.show({**STATUS, "message": "rank 1 was killed"})
    assert sum("rank 1 was killed" in line for line in plain.lines) == 1


def test_panel_holds_all_that_matters() -> None:
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
        view.say("committed step 100")
    assert "committed step 100" in console.export_text()


def test_summary_leaves_out_what_is_not_known() -> None:
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


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "attempt-started", "attempt": 1}, None),
        ({"event": "attempt-started", "attempt": 2}, "attempt 2 starts"),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": 0}, None),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": 10}, "attempt 2 ended with exit code 10"),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": None}, "attempt 2 is gone without an exit code"),
        (
            {"event": "committed", "step": 120, "bytes": 12_000_000, "seconds": 0.42},
            "committed step 120 (12 MB in 0.4 s)",
        ),
        (
            {"event": "evaluated", "step": 9, "loss": 0.5, "exactMatch": 0.25, "executionAccuracy": None},
            "evaluation after step 9: loss 0.5000, exact match 25.0%",
        ),
        ({"event": "restored", "step": 9}, None),
    ],
)
def test_events_in_words(event: dict[str, Any], text: str | None) -> None:
    assert sentences.sentence(event) == text


def test_start_of_a_worker_group_says_where_it_goes_on() -> None:
    event = {"event": "generation-started", "worldSize": 2, "zeroStage": 2, "microBatchSize": 8, "step": 120}
    resumed = sentences.sentence({**event, "restoredFrom": "step-00000120.gen-1", "stepsLost": 3})
    assert resumed == "2 worker(s) start from step 120, 3 steps to do again (ZeRO-2, micro-batch 8)"
    fresh = sentences.sentence({**event, "restoredFrom": None, "step": 0, "stepsLost": 0})
    assert fresh == "2 worker(s) start from the beginning (ZeRO-2, micro-batch 8)"
