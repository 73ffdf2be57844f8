"""The best evaluation and early stopping, as functions of the history."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.job import BestSpec, EvaluationSpec
from spotune_trainer.checkpoint.evaluations import (
    Evaluation,
    best_evaluation,
    current_scores,
    describe_early_stop,
    with_evaluation,
)

TOTAL = 1000


def settings(patience: int = 3, min_delta: float = 0.0, **best: Any) -> EvaluationSpec:
    metric = best.get("metric", "loss")
    return EvaluationSpec.model_validate(
        {
            "everySteps": 10,
            "generate": True,
            "metrics": list(dict.fromkeys(["loss", metric])),
            "best": best,
            "earlyStopping": {"patience": patience, "minDelta": min_delta},
        }
    )


def losses(*values: float, total_steps: int = TOTAL) -> tuple[Evaluation, ...]:
    return tuple(Evaluation.of(10 * number, total_steps, value, {}) for number, value in enumerate(values, start=1))


def scores(*values: float | None, metric: str = "exactMatch") -> tuple[Evaluation, ...]:
    return tuple(Evaluation.of(10 * number, TOTAL, 1.0, {metric: value}) for number, value in enumerate(values, 1))


def stop_step(history: Sequence[Evaluation], spec: EvaluationSpec) -> int | None:
    """The step after which training stops: that of the first evaluation that stops it."""
    for count in range(1, len(history) + 1):
        if describe_early_stop(history[:count], spec, TOTAL) is not None:
            return history[count - 1].step
    return None


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "expected"),
    [
        ([5, 4, 3, 2, 1], 1, 0.0, None),
        ([5, 4, 4.5, 4.2, 4.1], 3, 0.0, 50),
        ([5, 4, 4.5, 4.2, 3.9, 4, 4], 3, 0.0, None),
        ([5, 4, 4.5, 4.2, 3.9, 4, 4, 4], 3, 0.0, 80),
        ([4, 4], 1, 0.0, 20),
        ([5, 4.95, 4.92], 2, 0.1, 30),
        ([5, 4.95, 4.89, 4.85, 4.8], 2, 0.1, 50),
        ([5, 4.96, 4.92, 4.88, 4.84, 4.8, 4.76], 3, 0.1, None),
        ([math.nan, math.nan], 2, 0.0, 20),
        ([math.nan, 5, math.inf, 4], 2, 0.0, None),
        ([5, math.nan, math.nan], 2, 0.0, 30),
    ],
    ids=[
        "improves every time",
        "three without improvement",
        "improvement resets the count",
        "stops after a later best",
        "an equal value is no improvement",
        "less than minDelta is no improvement",
        "patience counts from the last improvement",
        "slow progress adds up",
        "never a value",
        "values that are not finite between improvements",
        "no value is no improvement",
    ],
)
def test_training_stops_after_patience_evaluations_without_improvement(
    values: list[float], patience: int, min_delta: float, expected: int | None
) -> None:
    assert stop_step(losses(*values), settings(patience, min_delta)) == expected


def test_scores_are_better_when_they_are_higher_and_functions_as_their_mode_says() -> None:
    rising = scores(0.1, 0.2, 0.3, 0.4)
    falling = scores(0.4, 0.3, 0.2)
    assert stop_step(rising, settings(2, metric="exactMatch")) is None
    assert stop_step(falling, settings(2, metric="exactMatch")) == 30
    errors = scores(0.4, 0.3, 0.2, metric="error_rate")
    assert stop_step(errors, settings(2, metric="m:error_rate")) == 30
    assert stop_step(errors, settings(2, metric="m:error_rate", mode="min")) is None
    assert stop_step(scores(None, None), settings(2, metric="exactMatch")) == 20


def test_the_reason_says_when_it_stopped_and_where_the_best_is() -> None:
    history = losses(5, 0.4123, 0.4121, 0.45, 0.46)
    assert describe_early_stop(history, settings(3, 0.01), TOTAL) == (
        "stopped early after step 50: loss has not improved by more than 0.01 in 3 evaluations; "
        "best 0.4121 after step 30"
    )
    reason = describe_early_stop(scores(None, metric="bleu"), settings(1, metric="a.b:bleu"), TOTAL)
    assert reason == "stopped early after step 10: bleu has not improved in 1 evaluation; it never had a value"


def test_a_job_without_early_stopping_never_stops_early() -> None:
    spec = EvaluationSpec.model_validate({"everySteps": 10, "best": {"metric": "loss"}})
    assert stop_step(losses(1, 2, 3, 4, 5, 6, 7, 8), spec) is None
    assert describe_early_stop((), settings(1), TOTAL) is None


def test_a_longer_run_gets_new_patience_but_keeps_what_it_has_to_beat() -> None:
    spec = settings(2)
    shorter = losses(5, 4, 4.5, 4.6, total_steps=40)
    assert describe_early_stop(shorter, spec, 40) is not None
    assert describe_early_stop(shorter, spec, TOTAL) is None
    worse = [Evaluation.of(step, TOTAL, loss, {}) for step, loss in ((50, 4.4), (60, 4.3))]
    assert describe_early_stop((*shorter, worse[0]), spec, TOTAL) is None
    assert describe_early_stop((*shorter, *worse), spec, TOTAL) is not None, "4.3 is not better than 4"
    better = Evaluation.of(60, TOTAL, 3.9, {})
    assert describe_early_stop((*shorter, worse[0], better), spec, TOTAL) is None


@given(
    st.lists(st.floats(0, 8).map(lambda value: round(value, 1)), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(0, 29),
)
def test_a_history_that_is_cut_and_repeated_decides_the_same(values: list[float], patience: int, cut: int) -> None:
    """A run that was killed repeats the evaluations after its checkpoint, and gets the same values."""
    history = losses(*values)
    resumed: tuple[Evaluation, ...] = history[:cut]
    for evaluation in history[cut:]:
        resumed = with_evaluation(resumed, evaluation)
    assert resumed == history
    assert with_evaluation(history, history[cut % len(history)]) == history, "an evaluation counts once"
    spec = settings(patience)
    assert stop_step(resumed, spec) == stop_step(history, spec) == simple_stop_step(values, patience)


def simple_stop_step(values: Sequence[float], patience: int) -> int | None:
    """The stop step without minDelta, from its definition: the best of all is `patience` evaluations ago."""
    for count in range(1, len(values) + 1):
        seen = list(values[:count])
        if count - 1 - seen.index(min(seen)) >= patience:
            return 10 * count
    return None


def test_best_is_the_first_of_equal_values_whatever_min_delta_is() -> None:
    best = BestSpec(metric="loss")
    assert best_evaluation(losses(3, 2, 2, 4), best) == losses(3, 2)[1]
    assert best_evaluation(losses(3, math.nan), best) == losses(3)[0]
    assert best_evaluation(losses(math.nan), best) is None
    assert best_evaluation((), best) is None
    found = best_evaluation(scores(0.1, 0.5, None, 0.5, metric="bleu"), BestSpec(metric="a:bleu"))
    assert found is not None
    assert found.step == 20


def test_history_survives_json() -> None:
    history = (
        Evaluation.of(10, 20, math.nan, {"exactMatch": None, "bleu": 0.1 + 0.2}),
        *losses(1 / 3),
        Evaluation.of(20, 20, 0.5, {}, {"sql": {"loss": 0.2, "exactMatch": 1.0}, "chat": {"loss": math.nan}}),
    )
    stored = json.loads(json.dumps([each.to_json() for each in history], allow_nan=False))
    assert tuple(map(Evaluation.from_json, stored)) == history
    assert ["bySource" in each for each in stored] == [False, False, True], "checkpoints of older versions have none"
    assert stored[2]["bySource"] == {"sql": {"loss": 0.2, "exactMatch": 1.0}, "chat": {"loss": None}}


ACCURACY = "arc_easy/acc"


def of_tasks(step: int, accuracy: float) -> Evaluation:
    return Evaluation.of_tasks(step, TOTAL, {ACCURACY: accuracy})


def by_accuracy(patience: int) -> EvaluationSpec:
    values = {"metric": ACCURACY}
    harness = {"tasks": ["arc_easy"], "everySteps": 20}
    return EvaluationSpec.model_validate(
        {"harness": harness, "best": values, "earlyStopping": {"patience": patience}, "everySteps": 10}
    )


def test_evaluations_of_data_and_of_tasks_at_one_step_are_one_evaluation() -> None:
    of_data = Evaluation.of(10, TOTAL, 2.0, {}, {"sql": {"loss": 2.0}})
    for history in ((of_data, of_tasks(10, 0.5)), (of_tasks(10, 0.5), of_data)):
        combined: tuple[Evaluation, ...] = ()
        for each in history:
            combined = with_evaluation(combined, each)
        assert combined == (replace(of_data, scores={ACCURACY: 0.5}),)
    assert Evaluation.from_json(json.loads(json.dumps(of_tasks(10, 0.5).to_json()))) == of_tasks(10, 0.5)


def test_evaluations_that_do_not_have_the_metric_neither_improve_nor_lose_patience() -> None:
    data = losses(5, 4, 4.5, 4.2)
    history = data
    for step, accuracy in ((20, 0.5), (25, 0.4), (40, 0.6)):
        history = with_evaluation(history, of_tasks(step, accuracy))
    assert describe_early_stop(history, settings(patience=3), TOTAL) is None, "two evaluations of the data after 4"
    assert describe_early_stop(history, by_accuracy(patience=2), TOTAL) is None
    assert best_evaluation(history, BestSpec(metric=ACCURACY)) == history[-1]
    stopped = with_evaluation(with_evaluation(history, of_tasks(45, 0.6)), of_tasks(60, 0.1))
    reason = describe_early_stop(stopped, by_accuracy(patience=2), TOTAL)
    assert reason is not None
    assert "arc_easy/acc has not improved in 2 evaluations; best 0.6 after step 40" in reason


def test_lower_perplexities_of_tasks_are_better() -> None:
    assert BestSpec(metric="wikitext/word_perplexity").prefers_lower
    assert not BestSpec(metric=ACCURACY).prefers_lower
    assert BestSpec.model_validate({"metric": ACCURACY, "mode": "min"}).prefers_lower


def test_current_scores_are_the_newest_of_the_data_and_of_the_tasks() -> None:
    history = with_evaluation(scores(0.1, 0.2, 0.3), of_tasks(20, 0.5))
    assert current_scores(history) == {"exactMatch": 0.3, ACCURACY: 0.5}
    assert current_scores(with_evaluation(history, of_tasks(40, 0.6))) == {"exactMatch": 0.3, ACCURACY: 0.6}
    assert current_scores(()) == {}
