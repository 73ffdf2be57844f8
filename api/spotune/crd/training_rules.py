"""CEL rules of spec.training: hyperparameters, and how a model is evaluated."""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule, merged
from spotune.crd.user_code_rules import CODE_FROM_RULES
from spotune.job import BestSpec, EvaluationSpec, HarnessSpec, TrainingSpec
from spotune.job.training.hyperparameters import (
    LABEL_OBJECTIVES,
    NO_FOLDER,
    PREFERENCE_OBJECTIVES,
    SCHEDULE_FREE_SCHEDULERS,
    TWO_CODES,
)
from spotune.job.training.metric import ALL_OBJECTIVE_METRICS, BUILT_IN, OBJECTIVE_METRICS


def _name_in_cel(metric: str) -> str:
    """CEL equivalent of `spotune.job.training.metric.metric_name`."""
    return f"{metric}.substring({metric}.indexOf(':') + 1)"


_LABELS: Final = list(LABEL_OBJECTIVES)

_OF_HARNESS: Final = "self.best.metric.contains('/')"

_EVALUATION = (
    Rule(
        "self.generate || !self.metrics.exists(metric, metric != 'loss')",
        "all metrics except loss compare generated answers: set generate: true",
        "metrics",
    ),
    Rule(
        f"self.metrics.all(one, !one.contains(':') || !({_name_in_cel('one')} in {list(BUILT_IN)}))",
        "contains a function with the name of a built-in metric: rename the function",
        "metrics",
    ),
    Rule(
        f"self.metrics.all(one, self.metrics.exists_one(other, {_name_in_cel('other')} == {_name_in_cel('one')}))",
        "lists a metric twice, or two functions with the same name",
        "metrics",
    ),
    Rule(
        "has(self.sql) || !('executionAccuracy' in self.metrics)",
        "is required by executionAccuracy: set sql.databases to a folder of <name>.sqlite files",
        "sql",
    ),
    Rule(
        "!has(self.sql) || 'executionAccuracy' in self.metrics",
        "is only used by the metric executionAccuracy, which is not in metrics",
        "sql",
    ),
    Rule(
        "!has(self.earlyStopping) || has(self.best)",
        "requires the metric that evaluations are compared by: set best.metric",
        "earlyStopping",
    ),
    Rule(
        f"!has(self.best) || {_OF_HARNESS} || self.everySteps > 0",
        "must be at least 1, because best compares evaluations during training",
        "everySteps",
    ),
    Rule(
        f"!has(self.best) || !{_OF_HARNESS} || has(self.harness)",
        "is a score of lm-evaluation-harness: set harness.tasks",
        "best.metric",
    ),
    Rule(
        f"!has(self.best) || !{_OF_HARNESS} || !has(self.harness) || self.harness.everySteps > 0",
        "must be at least 1, because best compares scores of its tasks during training",
        "harness.everySteps",
    ),
)

_BEST = (
    Rule(
        f"self.mode == 'auto' || !(self.metric in {[*BUILT_IN, *ALL_OBJECTIVE_METRICS]})",
        "is only for functions and tasks: remove this field",
        "mode",
    ),
)

_HARNESS = (
    Rule(
        "!has(self.includePath) || !self.includePath.contains('://')",
        "must be a folder: task files are not read from stores",
        "includePath",
    ),
    Rule("self.tasks.all(one, self.tasks.exists_one(other, other == one))", "lists a task twice", "tasks"),
)


def _objectives_by_metrics() -> dict[tuple[str, ...], list[str]]:
    """The objectives whose evaluations have the same metrics beside the loss, by these metrics."""
    found: dict[tuple[str, ...], list[str]] = {}
    for objective, metrics in OBJECTIVE_METRICS.items():
        if metrics:
            found.setdefault(metrics, []).append(objective)
    return found


def _is_default(field: str) -> str:
    """CEL expression that is true if a number of `training` has its default value."""
    described = TrainingSpec.model_fields[field]
    return f"self.{described.alias} == {described.default!r}"


_TRAINING = (
    Rule(
        "self.function != '' || size(self.command) > 0 || has(self.epochs) || has(self.maxSteps)",
        "has no length: set epochs, maxSteps, or both",
    ),
    Rule("self.function == '' || size(self.command) == 0", "set function or command, not both", "command"),
    Rule("size(self.command) == 0 || self.command[0] != ''", "has no program: its first entry is empty", "command"),
    Rule("!self.code.contains('://')", NO_FOLDER, "code"),
    Rule("self.code == '' || !has(self.codeFrom)", TWO_CODES, "codeFrom"),
    *(
        Rule(
            f"self.function != '' || size(self.command) > 0 || {unset}",
            "is only used by function and command: set one of them, or remove it",
            field,
        )
        for field, unset in (("code", "self.code == ''"), ("codeFrom", "!has(self.codeFrom)"))
    ),
    Rule("self.warmupRatio == 0.0 || self.warmupSteps == 0", "set warmupRatio or warmupSteps, not both", "warmupSteps"),
    Rule(
        "self.scheduler != 'constant' || (self.warmupRatio == 0.0 && self.warmupSteps == 0)",
        "constant has no warm-up: use constant_with_warmup",
        "scheduler",
    ),
    Rule("!has(self.maxSteps) || self.warmupSteps <= self.maxSteps", "must not be more than maxSteps", "warmupSteps"),
    Rule(
        f"self.optimizer != 'schedule_free_adamw' || self.scheduler in {list(SCHEDULE_FREE_SCHEDULERS)}",
        f"must be {' or '.join(SCHEDULE_FREE_SCHEDULERS)} for schedule_free_adamw",
        "scheduler",
    ),
    Rule(
        "self.optimizer != 'schedule_free_adamw' || self.adamBeta1 > 0.0",
        "must be more than 0 for schedule_free_adamw: its average would have no effect",
        "adamBeta1",
    ),
    Rule(
        "self.optimizer != 'schedule_free_adamw' || self.emaDecay == 0.0",
        "is not supported for schedule_free_adamw, which averages the weights: remove it",
        "emaDecay",
    ),
    Rule(f"self.optimizer == 'muon' || {_is_default('muon_momentum')}", "is only used by muon", "muonMomentum"),
    *(
        Rule(
            f"self.optimizer != 'adafactor' || {_is_default(field)}",
            "is not used by adafactor: remove it",
            str(TrainingSpec.model_fields[field].alias),
        )
        for field in ("adam_beta1", "adam_beta2", "adam_epsilon")
    ),
    Rule(
        f"self.objective in {list(PREFERENCE_OBJECTIVES)} || "
        "(!has(self.preference.beta) && !has(self.preference.targetMargin))",
        "is only used by the objectives dpo, orpo, simpo and kto: set objective",
        "preference",
    ),
    Rule(
        "self.objective == 'dpo' || self.preference.labelSmoothing == 0.0",
        "is only used by dpo",
        "preference.labelSmoothing",
    ),
    Rule(
        "self.objective == 'simpo' || !has(self.preference.targetMargin)",
        "is only used by simpo",
        "preference.targetMargin",
    ),
    *(
        Rule(
            f"self.objective == 'kto' || self.preference.{field} == 1.0",
            "is only used by kto",
            f"preference.{field}",
        )
        for field in ("desirableWeight", "undesirableWeight")
    ),
    Rule(
        f"self.objective in {['sft', *_LABELS]} || self.labelSmoothing == 0.0",
        "smooths the cross-entropy of sft: remove it",
        "labelSmoothing",
    ),
    Rule(
        f"!(self.objective in {['reward', 'embedding', *_LABELS]}) || self.neftuneNoiseAlpha == 0.0",
        "is not supported for models that generate no text: remove it",
        "neftuneNoiseAlpha",
    ),
    Rule(
        "!has(self.evaluation.best) || self.evaluation.best.metric == 'loss' || "
        "self.evaluation.best.metric.contains('/') || self.evaluation.best.metric in self.evaluation.metrics || "
        + " || ".join(
            f"(self.objective in {objectives} && self.evaluation.best.metric in {list(metrics)})"
            for metrics, objectives in _objectives_by_metrics().items()
        ),
        "is not evaluated: use loss, one of metrics, or what this objective evaluates",
        "evaluation.best.metric",
    ),
    Rule(
        "self.objective == 'embedding' || (self.embedding.pooling == 'mean' && self.embedding.normalize && "
        "self.embedding.temperature == 0.05)",
        "is only used by the objective embedding",
        "embedding",
    ),
    Rule(
        "self.objective != 'embedding' || self.globalBatchSize > 1",
        "must be at least 2: embedding needs other rows in a step as negatives",
        "globalBatchSize",
    ),
)

_SHARED: Final = (
    "self.preference",
    "self.embedding",
    "self.evaluation",
    "self.objective",
    "self.optimizer",
    "self.scheduler",
    "self.warmupSteps",
    "self.command",
)
"""CEL paths that many of the rules of `training` read."""

TRAINING_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    EvaluationSpec: _EVALUATION,
    BestSpec: _BEST,
    HarnessSpec: _HARNESS,
    TrainingSpec: tuple(merged(_TRAINING, (), _SHARED, "spec.training")),
    **CODE_FROM_RULES,
}
"""CEL rules of spec.training by section."""
