"""What objectives compute beside the loss has the names that trackers, reports and `evaluation.best` know."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from spotune.job.training.hyperparameters import Objective
from spotune.job.training.metric import OBJECTIVE_METRICS, STEP_STATISTICS
from spotune_trainer.evaluation.label_scores import label_scorer
from spotune_trainer.objectives.build import training_objective
from tests.trainer.support.tiny import make_job

LABELLED = {"label": "{topic}", "labels": ["O", "B-CITY"]}


@pytest.mark.parametrize("objective", get_args(Objective))
def test_statistics_have_the_names_that_trackers_have_curves_for(objective: str) -> None:
    job = make_job("/model", training={"globalBatchSize": 8})
    training = job.spec.training.model_copy(update={"objective": objective})
    statistics = training_objective(training).statistics
    assert tuple(statistics.names) == STEP_STATISTICS[objective]
    means = statistics.means([1.0] * statistics.size, 1)
    assert set(means) == set(STEP_STATISTICS[objective])


@pytest.mark.parametrize(("objective", "text"), [("classification", "{body}"), ("tokenClassification", "{words}")])
def test_scores_of_labels_have_the_names_that_best_knows(objective: str, text: str) -> None:
    job = make_job("/model", "causal", dataset={**LABELLED, "text": text}, training={"objective": objective})
    scorer = label_scorer(job)
    assert scorer is not None
    expected = [0, 1]
    counts = scorer.count(*(np.array([expected] if objective == "tokenClassification" else expected),) * 2)
    assert {*STEP_STATISTICS[objective], *scorer.scores(counts)} == {*OBJECTIVE_METRICS[objective]}
