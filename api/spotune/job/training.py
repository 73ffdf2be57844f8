"""How a model is trained and evaluated: the hyperparameters that determine the weights."""

import re
from collections import Counter
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from spotune.custom_resource.base import (
    NonNegativeInt,
    OptionalSource,
    PositiveInt,
    Section,
    Source,
    invalid,
    with_cel_rules,
)
from spotune.job.metric import (
    ALL_OBJECTIVE_METRICS,
    BUILT_IN,
    ENTRY_POINT,
    MAX_METRIC_CHARACTERS,
    MAX_METRICS,
    OBJECTIVE_METRICS,
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

Objective = Literal[
    "sft", "dpo", "orpo", "simpo", "kto", "reward", "embedding", "classification", "tokenClassification"
]
LABEL_OBJECTIVES: Final = ("classification", "tokenClassification")
"""Objectives that learn the labels of texts or of words: the model gets a head with one output for each label."""
PREFERENCE_OBJECTIVES: Final = ("dpo", "orpo", "simpo", "kto")
"""Objectives of language models that learn from preferences, with the hyperparameters of `PreferenceSpec`."""


class PreferenceSpec(Section):
    """Hyperparameters of the objectives that learn from preferences."""

    beta: Annotated[float, Field(gt=0)] | None = None
    """dpo and kto: how strongly the model is kept near the reference model (0.1). orpo: weight of the odds ratio loss
    (0.1). simpo: scale of the reward (2.0). Absent: the value in parentheses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo: probability that chosen and rejected are swapped in the data (conservative DPO)."""
    target_margin: Annotated[float, Field(ge=0)] | None = None
    """simpo: reward by which chosen answers should exceed rejected ones. Absent: 0.5."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the loss of desirable answers."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the loss of undesirable answers."""


class EmbeddingSpec(Section):
    """How the objective embedding makes one vector of a text, and compares two of them."""

    pooling: Literal["mean", "cls", "lastToken"] = "mean"
    """Which outputs of the last layer become the embedding. mean: the mean over all tokens. cls: that of the first
    token. lastToken: that of the last token, for decoders."""
    normalize: bool = True
    """Scale embeddings to length 1, so that they are compared by the cosine. false: by the dot product."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Similarities are divided by this in the loss: 1 / scale of sentence-transformers."""


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


_EXPECTED_FUNCTION: Final = "a function as package.module:function"


def _check_function(function: str) -> str:
    if function and not re.fullmatch(ENTRY_POINT, function):
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _EXPECTED_FUNCTION})
    return function


TrainingFunction = Annotated[
    str,
    AfterValidator(_check_function),
    with_cel_rules((f"self.matches(r'^({ENTRY_POINT})?$')", f"expected {_EXPECTED_FUNCTION}"), max_length=200),
]
FunctionConfig = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]

Optimizer = Literal["adamw", "adamw8bit", "schedule_free_adamw", "muon", "adafactor"]
WHOLE_MATRIX_OPTIMIZERS: Final[frozenset[Optimizer]] = frozenset({"muon", "adafactor"})
"""Optimizers whose update needs whole matrices: ZeRO stages 0 to 2, without offload."""
FIXED_POINT_EPSILON: Final = 1e-8
"""Smallest `adam_epsilon` beside which the rounding of gradients in fixed point does not matter (docs/adr/0051)."""
SCHEDULE_FREE_SCHEDULERS: Final = ("constant", "constant_with_warmup")
"""Learning rate schedules that schedule-free AdamW supports."""
_ADAM_FIELDS: Final = ("adam_beta1", "adam_beta2", "adam_epsilon")


class TrainingSpec(Section):
    """Hyperparameters. Names follow Hugging Face TrainingArguments."""

    function: TrainingFunction = ""
    """Your own training function as package.module:function. Each worker calls it in place of spotune's training loop,
    and it may use Ray Train. Such a job has neither model nor dataset."""
    code: OptionalSource = ""
    """Folder with the modules of function, such as a path on the shared volume. Empty: they are in the image. It may
    change at any time and applies to the next worker group."""
    config: FunctionConfig = Field(default={})
    """Argument of function. It may change until the job has ended, and applies to the next worker group."""
    objective: Objective = "sft"
    """sft: cross-entropy of the expected text. dpo, orpo, simpo: prefer dataset.chosen over dataset.rejected. kto: make
    answers more or less likely by dataset.label. reward: a model that scores answers, chosen ones higher than rejected
    ones, instead of writing them. embedding: a model whose embeddings are near for dataset.query and positive.
    classification: a model that gives each text one of dataset.labels. tokenClassification: one of them for each
    word."""
    preference: PreferenceSpec = PreferenceSpec()
    """Hyperparameters of dpo, orpo, simpo and kto."""
    embedding: EmbeddingSpec = EmbeddingSpec()
    """Embeddings of the objective embedding."""
    epochs: PositiveInt | None = None
    """Passes over the training data. Set this, maxSteps, or both. An epoch of a mixture has as many samples as its
    sources have together."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps. If epochs is also set, training ends at whichever comes first."""
    global_batch_size: PositiveInt = 32
    """Samples per optimizer step over all workers. It is exact for any number of workers."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """Peak learning rate."""
    scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Learning rate schedule, with the names of transformers.SchedulerType."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of all steps over which the learning rate rises from 0. Set this or warmupSteps."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises from 0."""
    optimizer: Optimizer = "adamw"
    """adamw: PyTorch's AdamW with float32 moments. adamw8bit: AdamW with 8-bit block-wise moments. schedule_free_adamw:
    AdamW that averages the weights instead of lowering the learning rate. muon: orthogonalized updates of hidden
    matrices, AdamW for all other parameters. adafactor: a factored second moment and no first moment."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Exponential decay rate of AdamW's first moment. schedule_free_adamw: share of the average in the weights that
    gradients are computed at."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Exponential decay rate of AdamW's second moment."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term in AdamW's denominator for numerical stability."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """muon: decay rate of the momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. Biases and normalisation weights are excluded."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the weights, which is exported beside them, such as 0.999. 0: none."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum L2 norm of the gradient; larger gradients are clipped. 0: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability mass that is spread evenly over all tokens, or over all labels of a classification."""
    neftune_noise_alpha: Annotated[float, Field(ge=0)] = 0.0
    """NEFTune: scale of the uniform noise that training adds to the embeddings. Its authors use 5 to 15. 0: no
    noise."""
    shuffle_block_size: NonNegativeInt = 0
    """Samples within which the order is shuffled. Larger values mix better but open more shards. 0: about 4 shards."""
    max_bad_steps: NonNegativeInt = 10
    """Number of consecutive steps with a non-finite loss that are skipped before the run fails."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Random seed for data order, dropout, noise and initialisation."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """When and how the model is evaluated."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is None and self.max_steps is None and not self.function:
            invalid("", "has no length: set epochs, maxSteps, or both")
        if "://" in self.code:
            invalid("code", "must be a folder: code is not read from stores")
        if not self.function:
            for field, value in (("code", self.code), ("config", self.config)):
                if value:
                    invalid(field, "is only used by function: set function, or remove it")
        if self.warmup_ratio and self.warmup_steps:
            invalid("warmupSteps", "set warmupRatio or warmupSteps, not both")
        if self.scheduler == "constant" and (self.warmup_ratio or self.warmup_steps):
            invalid("scheduler", "constant has no warm-up: use constant_with_warmup")
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            invalid("warmupSteps", f"{self.warmup_steps} is more than maxSteps, {self.max_steps}")
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "schedule_free_adamw":
            if self.scheduler not in SCHEDULE_FREE_SCHEDULERS:
                reason = f"{self.scheduler} contradicts schedule_free_adamw, which replaces a falling learning rate"
                invalid("scheduler", f"{reason}: use {' or '.join(SCHEDULE_FREE_SCHEDULERS)}")
            if not self.adam_beta1:
                invalid("adamBeta1", "must be more than 0 for schedule_free_adamw: its average would have no effect")
            if self.ema_decay:
                invalid("emaDecay", "is not supported for schedule_free_adamw, which averages the weights: remove it")
        if self.optimizer != "muon" and self.muon_momentum != _default("muon_momentum"):
            invalid("muonMomentum", f"is only used by muon; optimizer is {self.optimizer}")
        for field in _ADAM_FIELDS if self.optimizer == "adafactor" else ():
            if getattr(self, field) != _default(field):
                invalid(to_camel(field), "is not used by adafactor: remove it")
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        if self.objective not in PREFERENCE_OBJECTIVES and self.preference != PreferenceSpec():
            invalid("preference", "is only used by the objectives dpo, orpo, simpo and kto: set objective")
        if self.preference.label_smoothing and self.objective != "dpo":
            invalid("preference.labelSmoothing", f"is only used by dpo; objective is {self.objective}")
        if self.preference.target_margin is not None and self.objective != "simpo":
            invalid("preference.targetMargin", f"is only used by simpo; objective is {self.objective}")
        for field, weight in (
            ("desirableWeight", self.preference.desirable_weight),
            ("undesirableWeight", self.preference.undesirable_weight),
        ):
            if weight != 1.0 and self.objective != "kto":
                invalid(f"preference.{field}", f"is only used by kto; objective is {self.objective}")
        if self.objective not in ("sft", *LABEL_OBJECTIVES) and self.label_smoothing:
            reason = f"smooths the cross-entropy of sft; objective is {self.objective}: remove it"
            invalid("labelSmoothing", reason)
        if self.objective in ("reward", "embedding", *LABEL_OBJECTIVES) and self.neftune_noise_alpha:
            invalid("neftuneNoiseAlpha", f"is not supported for {self.objective}: remove it")
        if self.objective != "embedding" and self.embedding != EmbeddingSpec():
            invalid("embedding", f"is only used by the objective embedding; objective is {self.objective}")
        if self.objective == "embedding" and self.global_batch_size == 1:
            invalid("globalBatchSize", "must be at least 2: embedding needs other rows in a step as negatives")
        return self

    @model_validator(mode="after")
    def _check_best_metric(self) -> Self:
        best = self.evaluation.best
        computed = OBJECTIVE_METRICS[self.objective]
        if best is None or is_harness_metric(best.metric):
            return self
        if best.metric in ("loss", *self.evaluation.metrics, *computed):
            return self
        if computed:
            reason = f" for {self.objective}: use {', '.join(('loss', *computed))}"
        elif best.metric in ALL_OBJECTIVE_METRICS:
            reason = f" for {self.objective}: use loss, or one of metrics"
        else:
            reason = ": add it to metrics"
        invalid("evaluation.best.metric", f"{best.metric} is not evaluated{reason}")
        return self


def _default(field: str) -> Any:
    return TrainingSpec.model_fields[field].default
