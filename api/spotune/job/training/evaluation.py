"""When and how a model is evaluated, and which evaluation is the best."""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import NonNegativeInt, PositiveInt, Section, Source, invalid
from spotune.job.training.metric import (
    BUILT_IN,
    MAX_METRIC_CHARACTERS,
    MAX_METRICS,
    Metric,
    is_function,
    is_harness_metric,
    lower_is_better,
    metric_name,
)


class SqlSpec(Section):
    """The databases that generated SQL runs in."""

    databases: Source
    """Folder with one SQLite file <name>.sqlite per database."""
    column: str = "database"
    """Column of the evaluation rows that contains the database name."""


MAX_HARNESS_TASKS = 64
HarnessTask = Annotated[str, Field(max_length=200)]


class BestSpec(Section):
    """Which evaluation is the best. The checkpoint of its step is kept."""

    metric: Annotated[str, Field(max_length=MAX_METRIC_CHARACTERS)] = "loss"
    """loss, one of metrics, or what the objective evaluates. dpo, orpo, simpo, reward: rewardAccuracy, rewardMargin,
    rewardChosen or rewardRejected. kto: the same without rewardAccuracy, and kl. embedding: accuracyAt1 or mrr.
    classification: accuracy or macroF1. tokenClassification: accuracy or entityF1. With harness.everySteps also a
    score of its tasks, such as arc_easy/acc."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower (min) or higher (max) values of your own function, or of a task's score, are better. auto: max; for
    loss, rewardRejected and kl, min; for a task's score, what lm-evaluation-harness has."""

    @property
    def prefers_lower(self) -> bool:
        """Whether a lower value is better."""
        return lower_is_better(self.metric) if self.mode == "auto" else self.mode == "min"

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode != "auto" and not (is_function(self.metric) or is_harness_metric(self.metric)):
            better = "lower" if lower_is_better(self.metric) else "higher"
            reason = f"is only for functions and tasks; {better} values of {self.metric} are better"
            invalid("mode", f"{reason}: remove this field")
        return self


class EarlyStoppingSpec(Section):
    """When training ends before its last step, because evaluations by best.metric no longer improve."""

    patience: PositiveInt = 3
    """Consecutive evaluations without improvement after which training ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An evaluation improves if it is better than the last one that improved by more than this."""


class HarnessSpec(Section):
    """Tasks of lm-evaluation-harness that the exported model is evaluated on at the end, and the model in training."""

    tasks: list[HarnessTask] = Field(min_length=1, max_length=MAX_HARNESS_TASKS)
    """Names of tasks, groups or tags: those of the package lm-eval, or of includePath."""
    every_steps: NonNegativeInt = 0
    """Also evaluate the model in training every this many steps, on all workers. 0: only at the end."""
    include_path: Source | None = None
    """Folder with task files (*.yaml) of your own. Relative paths in them begin in this folder."""
    num_fewshot: NonNegativeInt | None = None
    """Number of examples in each prompt. Absent: that of the task."""
    limit: NonNegativeInt = 0
    """Use only the first this many documents of each task. 0: all."""
    batch_size: NonNegativeInt = 0
    """Requests per batch. 0: the batch size of the evaluation."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""

    @model_validator(mode="after")
    def _check_include_path(self) -> Self:
        if self.include_path is not None and "://" in self.include_path:
            invalid("includePath", "must be a folder: task files are not read from stores")
        if len(set(self.tasks)) < len(self.tasks):
            invalid("tasks", "lists a task twice")
        return self


class EvaluationSpec(Section):
    """When and how the model is evaluated on dataset.eval."""

    every_steps: NonNegativeInt = 0
    """Evaluate every this many steps. 0: only at the end."""
    generate: bool = False
    """Generate answers to the prompts. Required by all metrics except loss."""
    metrics: list[Metric] = Field(default=["loss"], min_length=1, max_length=MAX_METRICS)
    """loss; exactMatch: the answer equals the expected text; executionAccuracy: both queries return the same rows;
    package.module:function: the mean of your function's values over all answers."""
    max_new_tokens: PositiveInt = 128
    """Maximum length of a generated answer in tokens."""
    samples: NonNegativeInt = 0
    """Evaluate only the first this many samples. 0: all."""
    batch_size: NonNegativeInt = 0
    """Samples per evaluation batch and worker. 0: four times the micro-batch, or once if ZeRO-3 keeps layers."""
    sql: SqlSpec | None = None
    """Where generated SQL runs, for executionAccuracy."""
    best: BestSpec | None = None
    """Keep the checkpoint of the best evaluation. It is exported unless output.export is last."""
    early_stopping: EarlyStoppingSpec | None = None
    """End training when evaluations no longer improve. Requires best, which has the metric."""
    harness: HarnessSpec | None = None
    """Tasks of lm-evaluation-harness for the exported model. They need no dataset.eval, but the extra
    spotune[lm-eval]."""

    @property
    def compared_every_steps(self) -> int:
        """Steps between the evaluations that best compares; 0: none."""
        if self.best is None:
            return 0
        if is_harness_metric(self.best.metric):
            return self.harness.every_steps if self.harness is not None else 0
        return self.every_steps

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.early_stopping is not None and self.best is None:
            invalid("earlyStopping", "requires the metric that evaluations are compared by: set best.metric")
        if self.best is not None and is_harness_metric(self.best.metric):
            if self.harness is None:
                invalid("best.metric", f"{self.best.metric} is a score of lm-evaluation-harness: set harness.tasks")
            if not self.harness.every_steps:
                reason = "must be at least 1, because best compares scores of its tasks during training"
                invalid("harness.everySteps", reason)
        elif self.best is not None and not self.every_steps:
            invalid("everySteps", "must be at least 1, because best compares evaluations during training")
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        for metric in self.metrics:
            if metric != "loss" and not self.generate:
                invalid("metrics", f"{metric} compares generated answers: set generate: true")
            if is_function(metric) and metric_name(metric) in BUILT_IN:
                invalid("metrics", f"{metric} has the name of a built-in metric: rename the function")
        if len(set(self.metrics)) < len(self.metrics):
            invalid("metrics", "lists a metric twice")
        names = Counter(map(metric_name, self.metrics))
        [(name, times)] = names.most_common(1)
        if times > 1:
            reason = f"contains {times} functions named {name}, but scores are reported by name: rename all but one"
            invalid("metrics", reason)
        if "executionAccuracy" in self.metrics and self.sql is None:
            invalid("sql", "is required by executionAccuracy: set sql.databases to a folder of <name>.sqlite files")
        if self.sql is not None and "executionAccuracy" not in self.metrics:
            invalid("sql", "is only used by the metric executionAccuracy, which is not in metrics")
        return self
