"""Scores of labels against cases that were counted by hand, and scikit-learn's definition of macro F1."""

from __future__ import annotations

import numpy as np
import pytest

from spotune_trainer.evaluation.label_scores import EntityF1, MacroF1, iob2_entities

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def test_macro_f1_is_the_mean_over_the_labels_that_occur() -> None:
    scorer = MacroF1(5)
    expected, predicted = np.array([[0], [0], [0], [1], [1], [2]]), np.array([[0], [0], [1], [1], [2], [3]])
    # By hand: label 0 has 2 of 2 predicted and of 3 expected: 0.8. Label 1 has 1 of 2 and of 2: 0.5. Labels 2 and 3
    # have none right. Label 4 does not occur.
    scores = scorer.scores(scorer.count(predicted, expected))
    assert scores == {"macroF1": pytest.approx((0.8 + 0.5 + 0.0 + 0.0) / 4)}


def test_counts_of_batches_add_up() -> None:
    scorer = MacroF1(4)
    random = np.random.default_rng(1)
    expected, predicted = random.integers(0, 4, (2, 30, 1))
    whole = scorer.count(predicted, expected)
    parts = [scorer.count(predicted[start : start + 7], expected[start : start + 7]) for start in range(0, 30, 7)]
    assert whole == tuple(map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        ([], []),
        (["O", "O"], []),
        (["B-PER", "I-PER", "O", "B-LOC"], [("PER", 0, 2), ("LOC", 3, 4)]),
        (["B-PER", "B-PER"], [("PER", 0, 1), ("PER", 1, 2)]),
        (["B-PER", "I-LOC", "I-LOC"], [("PER", 0, 1), ("LOC", 1, 3)]),
        (["O", "I-PER", "I-PER"], [("PER", 1, 3)]),
        (["B-PRO-X", "I-PRO-X"], [("PRO-X", 0, 2)]),
    ],
)
def test_entities_of_a_sentence(labels: list[str], entities: list[tuple[str, int, int]]) -> None:
    assert list(iob2_entities(labels)) == entities


def test_an_entity_is_right_if_type_and_words_are() -> None:
    scorer = EntityF1(TAGS)
    expected = np.array([[-100, 1, 2, -100, 0, 3, 4, -100], [-100, 1, 0, 3, -100, -100, -100, -100]])
    predicted = np.array([[4, 1, 2, 3, 0, 3, 0, 1], [0, 3, 0, 3, 0, 0, 0, 0]])
    # By hand. Expected: PER, LOC of two words; PER, LOC. Predicted: PER, LOC of one word; LOC, LOC. Two are right.
    counts = scorer.count(predicted, expected)
    assert counts == (6, 8, 2, 4, 4)
    assert scorer.scores(counts) == {"accuracy": 6 / 8, "entityF1": 0.5}


def test_labels_that_mark_no_entities_have_an_accuracy_only() -> None:
    scorer = EntityF1(["NOUN", "VERB"])
    assert scorer.scores(scorer.count(np.array([[0, 1]]), np.array([[0, 0]]))) == {"accuracy": 0.5}


def test_nothing_to_score_gives_none() -> None:
    assert EntityF1(TAGS).scores((0, 0, 0, 0, 0)) == {"accuracy": None, "entityF1": None}
    assert MacroF1(2).scores((0,) * 6) == {"macroF1": None}
