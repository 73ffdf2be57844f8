"""Formatting of durations, progress and restarts by cause."""

import pytest

from spotune.formatting import (
    duration,
    evaluation,
    goodput,
    progress,
    restarts,
    score,
    scores_of,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (97_200, "1 d 03 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"step": 12, "totalSteps": 40, "loss": 1.23456}, "step 12/40, loss 1.2346"),
        ({"step": 12, "tokensPerSecond": 12345.6, "etaSeconds": 200}, "step 12, 12,346 tokens/s, 3 min 20 s left"),
        ({"totalSteps": None, "loss": None}, ""),
    ],
)
def test_unknown_values_are_omitted(status: dict[str, float | None], text: str) -> None:
    assert progress(status) == text


def test_restarts_are_counted_by_the_causes_that_happened() -> None:
    assert restarts({"workerLost": 2, "hang": 1, "appError": 0}) == "3 (workerLost 2, hang 1)"
    assert restarts({}) == "0"


def test_an_evaluation_is_its_loss_and_the_scores_that_are_known() -> None:
    scores = scores_of({"loss": 0.5, "exactMatch": 0.25, "executionAccuracy": None, "scores": {"bleu": 41.23456}})
    assert scores == {"exactMatch": 0.25, "bleu": 41.23456}
    assert evaluation(0.5, scores) == "loss 0.5000, exact match 25.0%, bleu 41.23"
    assert evaluation(None, {}) == ""
    assert score("executionAccuracy", 1.0) == ("execution accuracy", "100.0%")


@pytest.mark.parametrize(
    ("share", "parts", "text"),
    [
        (
            0.9312,
            {"productive": 931.2, "startup": 12.0, "lost": 56.0, "dataWait": 0.8},
            "93.1 % (lost work 56 s, start-up 12 s)",
        ),
        (1.0, {"productive": 50.0}, "100.0 %"),
        (None, {"stopped": 50.0}, ""),
    ],
)
def test_goodput_lists_other_parts_longest_first(share: float | None, parts: dict[str, float], text: str) -> None:
    assert goodput(share, parts) == text
