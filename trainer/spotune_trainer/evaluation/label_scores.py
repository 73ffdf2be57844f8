"""Scores of predicted labels: macro F1 of texts; accuracy and entity F1 of words.

Batches give integer counts, which add up over batches and ranks; scores are computed from their sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spotune.job import FinetuneJob
from spotune.job.training.metric import is_iob2
from spotune_trainer.data.batches import NO_LOSS

Labels = npt.NDArray[np.int64]
Counts = tuple[int, ...]

_OUTSIDE = "O"


class LabelScorer(Protocol):
    """Counts predictions of one batch, and computes scores from the sums of counts."""

    def count(self, predicted: Labels, expected: Labels) -> Counts:
        """Counts of a batch, from positions in ``dataset.labels``, ``[batch, labels]``; -100 where none is expected."""

    def scores(self, counts: Counts) -> dict[str, float | None]:
        """Scores by name, 0 to 1; None if there is nothing to score."""


def label_scorer(job: FinetuneJob) -> LabelScorer | None:
    """The scorer for the objective of a job; None if it predicts no labels."""
    match job.spec.training.objective:
        case "classification":
            return MacroF1(len(job.spec.dataset.labels))
        case "tokenClassification":
            return EntityF1(job.spec.dataset.labels)
    return None


class MacroF1:
    """Mean of the F1 of each label that is expected or predicted at least once, as by scikit-learn.

    Args:
        num_labels: number of labels.
    """

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels

    def count(self, predicted: Labels, expected: Labels) -> Counts:
        """Of each label: correct predictions, then all predictions, then expected ones."""
        chosen = expected != NO_LOSS
        found, needed = predicted[chosen], expected[chosen]
        each = [np.bincount(ids, minlength=self._num_labels) for ids in (found[found == needed], found, needed)]
        return tuple(np.concatenate(each).tolist())

    def scores(self, counts: Counts) -> dict[str, float | None]:
        """The macro F1."""
        correct, found, needed = np.array(counts, dtype=np.float64).reshape(3, -1)
        used = found + needed > 0
        return {"macroF1": float((2 * correct[used] / (found + needed)[used]).mean()) if used.any() else None}


class EntityF1:
    """Accuracy of words, and the F1 of entities: both their type and all of their words must be right.

    The F1 is that of the shared task CoNLL-2003 (Tjong Kim Sang and De Meulder 2003, section 2.4), over all types
    together. It needs labels in IOB2 format: O, and B-TYPE and I-TYPE for the first and for later words of an entity.

    Args:
        labels: names of all labels.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._has_entities = is_iob2(labels)

    def count(self, predicted: Labels, expected: Labels) -> Counts:
        """Correct words and all words; correct entities, predicted ones and expected ones."""
        chosen = expected != NO_LOSS
        totals = [int((predicted == expected)[chosen].sum()), int(chosen.sum())]
        entities = [0, 0, 0]
        if self._has_entities:
            for row, mask in enumerate(chosen):
                found, needed = (
                    set(iob2_entities([self._labels[position] for position in ids[row, mask]]))
                    for ids in (predicted, expected)
                )
                entities = [entities[0] + len(found & needed), entities[1] + len(found), entities[2] + len(needed)]
        return (*totals, *entities)

    def scores(self, counts: Counts) -> dict[str, float | None]:
        """The accuracy, and the F1 of entities if the labels are in IOB2 format."""
        right, total, correct, found, needed = counts
        scores: dict[str, float | None] = {"accuracy": right / total if total else None}
        if self._has_entities:
            scores["entityF1"] = 2 * correct / (found + needed) if found + needed else None
        return scores


def iob2_entities(labels: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """The entities of a sentence: type, first word, and the word after the last one.

    As in the evaluation script of CoNLL, an I-TYPE that continues no entity of its type begins one.

    Args:
        labels: of the words, in IOB2 format.
    """
    entity, start = "", 0
    for word, label in enumerate([*labels, _OUTSIDE]):
        prefix, _, kind = label.partition("-")
        continues = prefix == "I" and kind == entity
        if entity and not continues:
            yield entity, start, word
            entity = ""
        if kind and not continues:
            entity, start = kind, word
