"""The evaluations up to a checkpoint: which of them is the best, and whether training stops early.

Every checkpoint contains the history of evaluations up to its step. Both decisions are pure functions of that history,
so a run that resumes decides like one that was never interrupted. Evaluations after the checkpoint that a worker group
restores do not count: they are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spotune.job import BestSpec, EvaluationSpec
from spotune.job.training.metric import is_harness_metric, metric_name


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        step: optimizer steps done before it.
        total_steps: optimizer steps of the whole run, as planned at that time.
        loss: None if it was not finite, or if there is none.
        scores: by metric name, without the loss. None if no answer counted, or if the score was not finite.
        has_loss: whether the evaluation data was evaluated; False if only tasks of lm-evaluation-harness were.
        by_source: loss and scores of each source of a mixture; empty without a mixture, and in older checkpoints.
    """

    step: int
    total_steps: int
    loss: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    has_loss: bool = True
    by_source: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: int,
        total_steps: int,
        loss: float,
        scores: Mapping[str, float | None],
        by_source: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> Evaluation:
        """An evaluation whose values are None where they are not finite, which JSON cannot represent."""
        of_sources = {name: _all_finite(values) for name, values in (by_source or {}).items()}
        return cls(step, total_steps, _finite(loss), _all_finite(scores), by_source=of_sources)

    @classmethod
    def of_tasks(cls, step: int, total_steps: int, scores: Mapping[str, float]) -> Evaluation:
        """An evaluation on tasks of lm-evaluation-harness alone."""
        return cls(step, total_steps, None, dict(scores), has_loss=False)

    @property
    def task_scores(self) -> dict[str, float | None]:
        """The scores of lm-evaluation-harness; empty if its tasks were not evaluated, or failed."""
        return {name: score for name, score in self.scores.items() if is_harness_metric(name)}

    def evaluates(self, metric: str) -> bool:
        """Whether a metric was evaluated, perhaps without a value. Tasks and data need not be due at the same steps."""
        return metric in self.scores if is_harness_metric(metric) else self.has_loss

    def value(self, metric: str) -> float | None:
        """The value of a metric of `training.evaluation`; None if it is not known."""
        return self.loss if metric == "loss" else self.scores.get(metric_name(metric))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        only_tasks = {} if self.has_loss else {"hasLoss": False}
        by_source = {"bySource": self.by_source} if self.by_source else {}
        values = {"step": self.step, "totalSteps": self.total_steps, "loss": self.loss, "scores": dict(self.scores)}
        return {**values, **only_tasks, **by_source}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_json`."""
        has_loss = value.get("hasLoss", True)
        by_source = value.get("bySource", {})
        return cls(value["step"], value["totalSteps"], value["loss"], value["scores"], has_loss, by_source)


def with_evaluation(history: Sequence[Evaluation], evaluation: Evaluation) -> tuple[Evaluation, ...]:
    """The history with one more evaluation, ordered by step; its values replace earlier ones of the same step."""
    by_step = {each.step: each for each in history}
    if evaluation.step in by_step:
        earlier = by_step[evaluation.step]
        evaluation = replace(
            evaluation,
            loss=evaluation.loss if evaluation.has_loss else earlier.loss,
            scores={**earlier.scores, **evaluation.scores},
            has_loss=evaluation.has_loss or earlier.has_loss,
            by_source=evaluation.by_source if evaluation.has_loss else earlier.by_source,
        )
    return tuple(sorted({**by_step, evaluation.step: evaluation}.values(), key=lambda each: each.step))


def current_scores(history: Sequence[Evaluation]) -> dict[str, float]:
    """The newest known scores: those of the last evaluation of the data, and of the last one of the tasks."""
    of_data = next((each.scores for each in reversed(history) if each.has_loss), {})
    of_tasks = next((each.task_scores for each in reversed(history) if each.task_scores), {})
    own = {name: score for name, score in of_data.items() if not is_harness_metric(name)}
    return {name: score for name, score in {**own, **of_tasks}.items() if score is not None}


def best_evaluation(history: Sequence[Evaluation], best: BestSpec) -> Evaluation | None:
    """The evaluation with the best value, of equal ones the first; None if no evaluation has a value."""
    ranked = by_value(history, best)
    return ranked[0] if ranked else None


def by_value(history: Sequence[Evaluation], best: BestSpec) -> list[Evaluation]:
    """The evaluations that have a value, best first; equal ones by step."""
    valued = [(value, each) for each in history if (value := each.value(best.metric)) is not None]
    sign = 1.0 if best.prefers_lower else -1.0
    return [each for _, each in sorted(valued, key=lambda pair: (sign * pair[0], pair[1].step))]


def describe_early_stop(history: Sequence[Evaluation], settings: EvaluationSpec, total_steps: int) -> str | None:
    """Why training stops after the last evaluation of the history; None if it goes on.

    It stops after `patience` consecutive evaluations without improvement. An evaluation improves if its value is better
    by more than `minDelta` than that of the last one that improved, so slow progress adds up (as in Keras' and
    Lightning's `EarlyStopping`). An evaluation without a value does not improve. Evaluations of a run that was planned
    with another number of steps set the value to improve on, but do not count as lost patience: whoever makes a run
    longer gets at least `patience` more evaluations. Evaluations that did not evaluate the metric are passed over.

    Args:
        history: all evaluations so far, by step.
        settings: `training.evaluation` of the job.
        total_steps: optimizer steps of the whole run, as planned now.
    """
    best, stopping = settings.best, settings.early_stopping
    if best is None or stopping is None:
        return None
    sign = 1.0 if best.prefers_lower else -1.0
    improved: float | None = None
    without = 0
    for evaluation in history:
        if not evaluation.evaluates(best.metric):
            continue
        value = evaluation.value(best.metric)
        if value is not None and (improved is None or sign * (improved - value) > stopping.min_delta):
            improved, without = value, 0
        elif evaluation.total_steps == total_steps:
            without += 1
        else:
            without = 0
    if without < stopping.patience:
        return None
    name = metric_name(best.metric)
    by = f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
    times = f"{without} evaluation{'s' if without > 1 else ''}"
    found = best_evaluation(history, best)
    text = f"best {found.value(best.metric):.6g} after step {found.step}" if found else "it never had a value"
    return f"stopped early after step {history[-1].step}: {name} has not improved{by} in {times}; {text}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _all_finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in values.items()}
