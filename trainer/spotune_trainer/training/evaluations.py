"""The evaluations of a run on one rank: when they are due, their history, and what follows from it.

All ranks have the same history, because an evaluation has the same result on all of them. So they agree on the best
evaluation and on early stopping without a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spotune.job.training.metric import is_harness_metric, metric_name
from spotune_trainer.checkpoint.best import find_best_checkpoint
from spotune_trainer.checkpoint.evaluations import (
    Evaluation,
    best_evaluation,
    current_scores,
    describe_early_stop,
    with_evaluation,
)
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.evaluation.evaluate import EvaluationResult
from spotune_trainer.training.context import TrainContext

logger = logging.getLogger("spotune.worker")


@dataclass(frozen=True)
class ExportChoice:
    """The checkpoint to export.

    Attributes:
        checkpoint: its folder and manifest.
        evaluation: after its step, if that is not the last step.
        problem: why it is not the checkpoint that the job asks for; None if it is.
    """

    checkpoint: Checkpoint
    evaluation: Evaluation | None = None
    problem: str | None = None


class Evaluations:
    """Evaluates the model between steps, and judges by the results.

    Args:
        context: of the rank.
        run: evaluates the model after a step, on all ranks together; None if there is no evaluation data.
        run_tasks: scores of the tasks of lm-evaluation-harness after a step, on all ranks together; empty if they fail.

    Attributes:
        history: all evaluations of this run so far, by step; those after the restored checkpoint are repeated.
        stopped_early: why training stopped early; None if it did not.
    """

    def __init__(
        self,
        context: TrainContext,
        run: Callable[[int], EvaluationResult | None],
        run_tasks: Callable[[int], Mapping[str, float]],
    ) -> None:
        self.context = context
        self.settings = context.job.spec.training.evaluation
        self.history: tuple[Evaluation, ...] = ()
        self.stopped_early: str | None = None
        self._run = run
        self._run_tasks = run_tasks
        self._last: tuple[int, EvaluationResult | None] | None = None

    def restore(self, history: tuple[Evaluation, ...]) -> None:
        """Continue the history of the restored checkpoint."""
        self.history = history
        self._report()

    def is_due(self, step: int) -> bool:
        """Whether to evaluate between steps, after `step`. The last step is evaluated in any case, by `finalize`."""
        return 0 < step < self.context.total_steps and (self._data_is_due(step) or self._tasks_are_due(step))

    def evaluate(self, step: int) -> None:
        """Make the evaluations that are due after `step`, the current one."""
        if self._data_is_due(step):
            self.result_after(step)
        if self._tasks_are_due(step):
            self._score_tasks(step)

    def evaluate_last(self, step: int) -> EvaluationResult | None:
        """Evaluate after the last step; scores tasks only if these choose the export, which they are scored on."""
        result = self.result_after(step)
        best = self.settings.best
        if best is not None and is_harness_metric(best.metric) and not self._tasks_are_known(step):
            self._score_tasks(step)
        return result

    def after(self, step: int) -> Evaluation | None:
        """The evaluation after `step` in the history."""
        return next((each for each in self.history if each.step == step), None)

    def result_after(self, step: int) -> EvaluationResult | None:
        """The result of the evaluation after `step`, the current one. Evaluates unless this process has done so."""
        if self._last is None or self._last[0] != step:
            result = self._run(step)
            self._last = (step, result)
            if result is not None:
                evaluation = Evaluation.of(
                    step, self.context.total_steps, result.loss, result.scores, result.values_by_source
                )
                self.history = with_evaluation(self.history, evaluation)
                self._report()
        return self._last[1]

    def _data_is_due(self, step: int) -> bool:
        every, found = self.settings.every_steps, self.after(step)
        has_data = self.context.datasets.evaluation is not None
        return has_data and every > 0 and step % every == 0 and not (found is not None and found.has_loss)

    def _tasks_are_due(self, step: int) -> bool:
        every = self.settings.harness.every_steps if self.settings.harness is not None else 0
        return every > 0 and step % every == 0 and not self._tasks_are_known(step)

    def _tasks_are_known(self, step: int) -> bool:
        found = self.after(step)
        return found is not None and bool(found.task_scores)

    def _score_tasks(self, step: int) -> None:
        if scores := self._run_tasks(step):
            evaluation = Evaluation.of_tasks(step, self.context.total_steps, scores)
            self.history = with_evaluation(self.history, evaluation)
            self._report()

    def is_best(self, step: int) -> bool:
        """Whether the evaluation after `step` is the best so far, by `training.evaluation.best`."""
        best = self._best()
        return best is not None and best.step == step

    def stops_early(self) -> bool:
        """Whether training stops now. `stopped_early` then says why."""
        self.stopped_early = describe_early_stop(self.history, self.settings, self.context.total_steps)
        if self.stopped_early is not None:
            logger.info("%s", self.stopped_early)
            self.context.reporter.record_event("stopped-early", reason=self.stopped_early)
            self._report()
        return self.stopped_early is not None

    def choose_export(self, last: CheckpointName) -> ExportChoice:
        """The checkpoint that `output.export` asks for. If the best one is lost, the next best, with the reason.

        Args:
            last: checkpoint of the last step.
        """
        opened = open_checkpoint(self.context.directory.checkpoints / str(last))
        assert isinstance(opened, Checkpoint)
        best, found = self.settings.best, self._best()
        if best is None or self.context.job.spec.output.export == "last" or found is None or found.step == last.step:
            return ExportChoice(opened)
        usable = find_best_checkpoint(self.context.directory, self.history, best, self.context.reporter.heartbeat)
        step = usable.checkpoint.name.step if usable.checkpoint else last.step
        problem: str | None = None
        if usable.unusable:
            exported = f"the next best is exported, of step {step}" if usable.checkpoint else "the last one is exported"
            problem = f"{usable.unusable[0]}; {exported}"
            logger.warning("%s", problem)
            self.context.reporter.record_event("best-unusable", step=found.step, reason=problem)
        return ExportChoice(usable.checkpoint or opened, None if step == last.step else self.after(step), problem)

    def summary(self) -> dict[str, Any]:
        """`best` and `stoppedEarly` of `status.json` and `result.json`; None if they do not apply."""
        best, found = self.settings.best, self._best()
        shown = None
        if best is not None and found is not None:
            shown = {"step": found.step, "metric": metric_name(best.metric), "value": found.value(best.metric)}
        return {"best": shown, "stoppedEarly": self.stopped_early}

    def _best(self) -> Evaluation | None:
        return best_evaluation(self.history, self.settings.best) if self.settings.best is not None else None

    def _report(self) -> None:
        self.context.reporter.update(**self.summary())
        if self.history:
            self.context.reporter.update(evalScores=current_scores(self.history))
