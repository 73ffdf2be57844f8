"""What trackers show of an evaluation: curves, and generated answers as text."""

from __future__ import annotations

import warnings
from html import unescape
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.tracking.remote import Point
from spotune_trainer.observability.tracking.tracker import (
    SAMPLES,
    TensorBoardTracker,
    evaluation_point,
    html_table,
    markdown_table,
    samples_of,
    step_point,
)
from tests.trainer.support.tracked_runs import evaluated

HOSTILE = "<script>alert(1)</script> | **bold** [a](http://b) `c` _d_\n# head\\"


def test_tensorboard_has_the_answers_of_each_evaluation_once(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.rewind(0)
    for step in (3, 6):
        tracker.log_evaluation(evaluated(step, 0.5))
    tracker.log_evaluation({"step": 9, "loss": 0.5, "predictions": []})
    tracker.rewind(3)  # a new worker group starts after step 3, and repeats the evaluation after step 6
    tracker.log_evaluation(evaluated(6, 0.5))
    tracker.close(Phase.DONE)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    found = events.Tensors(f"{SAMPLES}/text_summary")
    assert [each.step for each in found] == [3, 6]
    shown = as_tensorboard_shows(tensor_util.make_ndarray(found[1].tensor_proto).item())
    assert shown.count("<tr>") == 3
    assert "<td>question 1</td>" in shown
    assert "<b>6" not in shown
    assert "<b>6</b> | no" in unescape(shown)


@pytest.mark.parametrize("objective", STEP_STATISTICS)
def test_a_step_has_a_curve_for_each_statistic_of_its_objective(objective: str) -> None:
    statistics = {name: 0.5 + number for number, name in enumerate(STEP_STATISTICS[objective])}
    point = step_point({"step": 3, "loss": 2.0, "seconds": 0.5, "tokens": 100, "labelTokens": 60, **statistics})
    curves = {f"train/{name}": value for name, value in statistics.items()}
    assert point == {"train/loss": 2.0, "train/tokensPerSecond": 200.0, **curves}


def test_samples_have_a_column_for_each_score() -> None:
    assert samples_of(evaluated(3, 0.5)) == [
        {"prompt": "question 0", "answer": "yes", "reference": "yes", "exactMatch": True, "bleu": 1.0},
        {"prompt": "question 1", "answer": "<b>3</b> | no", "reference": "yes", "exactMatch": False, "bleu": None},
    ]
    assert samples_of({"step": 3, "loss": 0.5}) == []


def test_answers_are_shown_as_they_are_whatever_they_contain() -> None:
    rows = [{"prompt": HOSTILE, "answer": "plain"}]
    shown = as_tensorboard_shows(markdown_table(rows).encode())
    for text in ("<script>", "<strong>", "<a ", "<code>", "<em>", "<h1>"):
        assert text not in shown
    assert shown.count("<td>") == 2
    assert "**bold** [a](http://b) `c` _d_ # head\\" in unescape(shown)
    assert html_table(rows) == (
        "<table><tr><th>prompt</th><th>answer</th></tr><tr><td>&lt;script&gt;alert(1)&lt;/script&gt; | **bold** "
        "[a](http://b) `c` _d_\n# head\\</td><td>plain</td></tr></table>"
    )


def as_tensorboard_shows(text: bytes) -> str:
    """The HTML that TensorBoard makes from a text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library that its sanitizer imports
        from tensorboard.plugin_util import markdown_to_safe_html
    return str(markdown_to_safe_html(text))


def test_point_of_an_evaluation_has_its_curves_and_answers() -> None:
    record = {**evaluated(3, 0.5), "scores": {"bleu": 41.0}}
    point = Point.of_evaluation(record)
    assert point.values == evaluation_point(record) == {"eval/loss": 0.5, "eval/bleu": 41.0}
    assert point.samples == samples_of(record)
