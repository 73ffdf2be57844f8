"""Messages for ledger events."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_trainer.observability.logs.event_messages import event_message, with_messages


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "attempt-started", "attempt": 1}, None),
        (
            {"event": "generation-started", "worldSize": 2, "zeroStage": 1, "microBatchSize": 4},
            "2 worker(s) start from the beginning (ZeRO-1, micro-batch 4)",
        ),
        (
            {
                "event": "generation-started",
                "worldSize": 2,
                "restoredFrom": "step-00000004.gen-1",
                "step": 4,
                "stepsLost": 3,
                "function": "train:train",
            },
            "2 worker(s) start from step 4, 3 steps to repeat (train:train)",
        ),
        ({"event": "attempt-started", "attempt": 2}, "attempt 2 starts"),
        ({"event": "node-unfit", "node": "n2", "reason": "hot"}, "node n2 is unfit and is left out: hot"),
        (
            {"event": "straggler-replaced", "reason": "rank 1 is slow"},
            "the node of a straggler is replaced: rank 1 is slow",
        ),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": 0}, None),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": 10}, "attempt 2 ended with exit code 10"),
        ({"event": "attempt-ended", "attempt": 2, "exitCode": None}, "attempt 2 was lost (no exit code)"),
        (
            {"event": "committed", "step": 120, "bytes": 12_000_000, "seconds": 0.42},
            "committed step 120 (12 MB in 0.4 s)",
        ),
        (
            {"event": "evaluated", "step": 9, "loss": 0.5, "exactMatch": 0.25, "executionAccuracy": None},
            "evaluation after step 9: loss 0.5000, exact match 25.0%",
        ),
        (
            {"event": "prepared", "source": "sql", "summary": "8 rows read", "leftOut": {}, "problems": []},
            "data of source sql is prepared: 8 rows read",
        ),
        (
            {
                "event": "leaving",
                "reason": "1 node(s) of the workers are draining",
                "seconds": 29.6,
                "why": "loses 3 s",
            },
            "1 node(s) of the workers are draining: the workers commit and exit within 30 s; loses 3 s",
        ),
        (
            {"event": "leaving", "reason": "fewer workers are requested", "seconds": None},
            "fewer workers are requested: the workers commit and exit",
        ),
        (
            {"event": "growth-postponed", "reason": "there are slots for 3 workers, 2 train", "why": "keeping is best"},
            "there are slots for 3 workers, 2 train: keeping is best",
        ),
        ({"event": "joined", "startSeconds": 7.9}, "a worker's node was ready to train 8 s after it joined"),
        ({"event": "replaced", "seconds": 61.7}, "a lost worker was replaced after 62 s"),
        ({"event": "restored", "step": 9}, None),
        (
            {"event": "restored", "step": 9, "memoryBytes": 3_000_000, "peerBytes": 1_500_000_000, "volumeBytes": 0},
            "restored step 9: 3 MB from memory, 1,500 MB from other nodes' memory",
        ),
    ],
)
def test_message_of_an_event(event: dict[str, Any], text: str | None) -> None:
    assert event_message(event) == text


def test_message_of_a_generation_names_the_step_that_it_starts_from() -> None:
    event = {"event": "generation-started", "worldSize": 2, "zeroStage": 2, "microBatchSize": 8, "step": 120}
    resumed = event_message({**event, "restoredFrom": "step-00000120.gen-1", "stepsLost": 3})
    assert resumed == "2 worker(s) start from step 120, 3 steps to repeat (ZeRO-2, micro-batch 8)"
    fresh = event_message({**event, "restoredFrom": None, "step": 0, "stepsLost": 0})
    assert fresh == "2 worker(s) start from the beginning (ZeRO-2, micro-batch 8)"


def test_nodes_that_joined_together_have_one_message() -> None:
    started = {"event": "attempt-started", "attempt": 2}
    joined: list[dict[str, Any]] = [{"event": "joined", "startSeconds": seconds} for seconds in (9.1, 9.1, 30.0, 9.1)]
    assert [(event, text) for event, text in with_messages([started, *joined])] == [
        (started, "attempt 2 starts"),
        (joined[0], "a worker's node was ready to train 9 s after it joined"),
        (joined[1], None),
        (joined[2], "a worker's node was ready to train 30 s after it joined"),
        (joined[3], "a worker's node was ready to train 9 s after it joined"),
    ]
