"""Which checkpoint a run exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

from spotune.job import BestSpec
from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.context import TrainContext
from spotune_trainer.training.evaluations import Evaluations
from tests.trainer.support.checkpoints import commit_checkpoint


def make_evaluations(directory: JobDirectory) -> Evaluations:
    """Evaluations of a job that exports the checkpoint with the lowest loss."""
    context: Any = Mock(spec=["directory", "job", "reporter"], directory=directory)
    context.job.spec.training.evaluation.best = BestSpec(metric="loss")
    return Evaluations(cast("TrainContext", context), Mock(), Mock())


def test_last_checkpoint_is_exported_with_the_reason_if_no_evaluated_one_is_whole(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    claim(directory, None)
    best, last = (commit_checkpoint(directory, step, 1) for step in (10, 20))
    shutil.rmtree(directory.checkpoints / str(best))
    evaluations = make_evaluations(directory)
    evaluations.restore((Evaluation(10, 20, 1.0), Evaluation(20, 20, None)))
    choice = evaluations.choose_export(last)
    reason = "the checkpoint of step 10 is not kept; the last one is exported"
    assert (choice.checkpoint.name, choice.evaluation, choice.problem) == (last, None, reason)
    record_event = cast("Mock", evaluations.context.reporter.record_event)
    record_event.assert_called_with("best-unusable", step=10, reason=reason)


def test_next_best_checkpoint_is_exported_with_the_values_of_its_evaluation(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    claim(directory, None)
    best, second, last = (commit_checkpoint(directory, step, 1) for step in (10, 20, 30))
    shutil.rmtree(directory.checkpoints / str(best))
    evaluations = make_evaluations(directory)
    evaluations.restore((Evaluation(10, 30, 1.0), Evaluation(20, 30, 2.0), Evaluation(30, 30, 3.0)))
    choice = evaluations.choose_export(last)
    reason = "the checkpoint of step 10 is not kept; the next best is exported, of step 20"
    assert (choice.checkpoint.name, choice.problem) == (second, reason)
    assert choice.evaluation == Evaluation(20, 30, 2.0)
