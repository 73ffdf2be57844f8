"""The spec of a FinetuneSweep: search space, search, objective, budget, and the job that each trial runs."""

from math import prod
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import NonNegativeInt, PositiveInt, Section, invalid
from spotune.job import FinetuneJobSpec
from spotune.job.lifecycle import TTL_LOSES_TRIALS, TtlSeconds
from spotune.job.training.metric import (
    ALL_OBJECTIVE_METRICS,
    BUILT_IN,
    OBJECTIVE_METRICS,
    is_harness_metric,
    lower_is_better,
    metric_name,
)
from spotune.service.field_types import METRIC_NAME, Form
from spotune.sweep.parameters import MAX_PARAMETERS, ParameterSpec, check_path

MAX_TRIALS: Final = 200
"""The status holds every trial, and an object of Kubernetes holds about a megabyte."""

ObjectiveMetric = Annotated[str, Form(METRIC_NAME, "the name of a metric such as loss or exactMatch", 100)]


class SearchSpec(Section):
    """How the parameters of each trial are chosen."""

    algorithm: Literal["grid", "random", "tpe"] = "tpe"
    """grid: every combination of values, in order. random: independent samples. tpe: Optuna's tree-structured Parzen
    estimator, which learns from the trials before."""
    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = None
    """Number of trials. Required by random and tpe. grid: at most this many combinations; absent: all. It may change at
    any time."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed of the search."""


class ObjectiveSpec(Section):
    """Which number of a trial is compared."""

    metric: ObjectiveMetric = "loss"
    """loss, one of training.evaluation.metrics (a function of your own by its name alone), or what the training
    objective evaluates, such as accuracy. Without pruning also a score of training.evaluation.harness, such as
    arc_easy/acc. With training.function: a number that the function reports."""
    mode: Literal["auto", "minimize", "maximize"] = "auto"
    """Whether lower or higher values are better. auto: minimize for loss, rewardRejected, kl and scores of
    the harness such as perplexity, else maximize."""

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Whether lower or higher values are better."""
        if self.mode != "auto":
            return self.mode
        return "minimize" if lower_is_better(self.metric) else "maximize"

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        is_known = self.metric in (*BUILT_IN, *ALL_OBJECTIVE_METRICS)
        if is_known and self.mode == ("maximize" if lower_is_better(self.metric) else "minimize"):
            better = "lower" if lower_is_better(self.metric) else "higher"
            invalid("mode", f"{better} values of {self.metric} are better: remove this field")
        return self


class TrialPruningSpec(Section):
    """When a trial is pruned (ended before its last step), because others are better at the same step."""

    algorithm: Literal["none", "asha"] = "none"
    """asha: asynchronous successive halving (Li et al. 2018, https://arxiv.org/abs/1810.05934), as Optuna has it."""
    min_steps: PositiveInt | None = None
    """Steps of the first rung, at which trials are compared first. Required by asha."""
    reduction_factor: Annotated[int, Field(ge=2, le=100)] = 3
    """Of the trials that reached a rung, the best 1/reductionFactor continue. Each rung has this many times the steps
    of the one before."""

    @model_validator(mode="after")
    def _check_min_steps(self) -> Self:
        if self.algorithm == "asha" and self.min_steps is None:
            invalid("minSteps", "is required by asha: set the number of steps after which trials are compared")
        return self


class BudgetSpec(Section):
    """When no new trial starts any more. Running trials go on."""

    max_gpu_hours: Annotated[float, Field(ge=0)] = 0
    """GPU hours of all trials together, as clouds bill them. 0: no limit."""
    max_failed_trials: NonNegativeInt = 3
    """Number of failed trials; the sweep has then failed. 0: no limit."""


class TrialTemplateSpec(Section):
    """The job that each trial runs, before its parameters are set."""

    spec: FinetuneJobSpec
    """The spec of a FinetuneJob."""


class FinetuneSweepSpec(Section):
    """Which hyperparameters are searched, how, and for which job."""

    parameters: dict[str, ParameterSpec] = Field(min_length=1, max_length=MAX_PARAMETERS)
    """The search space: values by field of the job's spec, such as training.learningRate or adapter.lora.r. Fields of
    model, adapter, dataset and training, and with training.function those of training.config. Frozen after the first
    trial."""
    search: SearchSpec = SearchSpec()
    """How the parameters of each trial are chosen. Frozen after the first trial, except trials."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """Which number of a trial is compared. Frozen after the first trial."""
    early_stopping: TrialPruningSpec = TrialPruningSpec()
    """When a trial is pruned. Frozen after the first trial."""
    max_concurrent: PositiveInt = 1
    """Number of trials that run at the same time."""
    budget: BudgetSpec = BudgetSpec()
    """When no new trial starts any more."""
    suspend: bool = False
    """true: suspend all running trials, and start no others. false: resume."""
    ttl_seconds_after_finished: TtlSeconds | None = None
    """Seconds after its end at which the sweep and the jobs of its trials are deleted. Absent: never."""
    template: TrialTemplateSpec
    """The job that each trial runs. Frozen after the first trial."""

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole sweep."""
        if self.search.algorithm != "grid":
            return self.search.trials or 0
        size = prod(len(self.parameters[path].all_values) for path in self.parameters)
        return min(size, self.search.trials or size)

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        for path in self.parameters:
            check_path(path)
        if self.search.algorithm != "grid":
            if self.search.trials is None:
                invalid("search.trials", f"is required by {self.search.algorithm}: set the number of trials")
            return self
        for path, parameter in self.parameters.items():
            if parameter.is_range:
                reason = f"{path} has infinitely many values, and grid tries all of them: use values, integer, or tpe"
                invalid("parameters", reason)
        if self.num_trials > MAX_TRIALS:
            invalid("search.trials", f"the grid has more than {MAX_TRIALS} combinations: set a number, or use tpe")
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        job = self.template.spec
        if job.suspend:
            invalid("template.spec.suspend", "is set by the sweep: use spec.suspend")
        if job.serving is not None:
            invalid("template.spec.serving", "would serve every trial: write a ModelService for the best one")
        if job.ttl_seconds_after_finished is not None:
            invalid("template.spec.ttlSecondsAfterFinished", TTL_LOSES_TRIALS)
        if job.output.hub is not None:
            invalid("template.spec.output.hub", "would be overwritten by every trial: upload the best one at the end")
        if not job.training.has_user_code:
            self._check_objective()
        return self

    def _check_objective(self) -> None:
        """Raise unless each trial evaluates the metric, and early enough to be pruned."""
        job, metric = self.template.spec, self.objective.metric
        evaluation, objective = job.training.evaluation, job.training.objective
        if not job.dataset.has_evaluation:
            reason = "is required, because trials are compared by evaluations: set source or fraction"
            invalid("template.spec.dataset.eval", reason)
        if is_harness_metric(metric):
            self._check_harness()
            return
        evaluated = ("loss", *(metric_name(each) for each in evaluation.metrics), *OBJECTIVE_METRICS[objective])
        if metric not in evaluated:
            reason = f"{metric} is not evaluated: add it to template.spec.training.evaluation.metrics"
            invalid("objective.metric", reason)
        if self.early_stopping.algorithm != "none" and evaluation.every_steps == 0:
            reason = "must be at least 1, because earlyStopping compares evaluations during training"
            invalid("template.spec.training.evaluation.everySteps", reason)

    def _check_harness(self) -> None:
        """Raise unless each trial has scores of lm-evaluation-harness, which are those of its exported model."""
        score = f"{self.objective.metric} is a score of lm-evaluation-harness"
        if self.template.spec.training.evaluation.harness is None:
            invalid("objective.metric", f"{score}: set template.spec.training.evaluation.harness.tasks")
        if self.early_stopping.algorithm != "none":
            invalid("objective.metric", f"{score}, by which no trials are pruned: remove earlyStopping")
