"""How a model is trained and evaluated: the hyperparameters that determine the weights."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from spotune.custom_resource.base import NonNegativeInt, OptionalSource, PositiveInt, Section, invalid
from spotune.job.training.code_source import CodeFromSpec
from spotune.job.training.evaluation import EvaluationSpec
from spotune.job.training.metric import ALL_OBJECTIVE_METRICS, OBJECTIVE_METRICS, is_harness_metric
from spotune.job.training.user_code import Command, TrainingFunction, UserConfig

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


Optimizer = Literal["adamw", "adamw8bit", "schedule_free_adamw", "muon", "adafactor"]
WHOLE_MATRIX_OPTIMIZERS: Final[frozenset[Optimizer]] = frozenset({"muon", "adafactor"})
"""Optimizers whose update needs whole matrices: ZeRO stages 0 to 2, without offload."""
FIXED_POINT_EPSILON: Final = 1e-8
"""Smallest `adam_epsilon` beside which the rounding of gradients in fixed point does not matter (docs/adr/0051)."""
SCHEDULE_FREE_SCHEDULERS: Final = ("constant", "constant_with_warmup")
"""Learning rate schedules that schedule-free AdamW supports."""
_ADAM_FIELDS: Final = ("adam_beta1", "adam_beta2", "adam_epsilon")


NO_FOLDER: Final = "must be a folder: for a repository or an archive, use codeFrom"
TWO_CODES: Final = "set code or codeFrom, not both"


class TrainingSpec(Section):
    """Hyperparameters. Names follow Hugging Face TrainingArguments."""

    function: TrainingFunction = ""
    """Your own training function as package.module:function. Each worker calls it in place of spotune's training loop,
    and it may use Ray Train. Such a job has neither model nor dataset."""
    command: Command = Field(default=[])
    """Your own program with its arguments, such as [torchrun, train.py]. It runs once on each node in place of
    spotune's training loop, with the worker group in its environment. Such a job has neither model nor dataset. It may
    change at any time and applies to the next worker group."""
    code: OptionalSource = ""
    """Folder with the modules of function, or in which command runs, such as a path on the shared volume. Empty: they
    are in the image. It may change at any time and applies to the next worker group."""
    code_from: CodeFromSpec | None = None
    """Read code from a git repository, an archive or a ConfigMap, in place of code. It may change at any time and
    applies to the next worker group."""
    config: UserConfig = Field(default={})
    """Argument of function; for command, it is in SPOTUNE_CONFIG as JSON. It may change until the job has ended, and
    applies to the next worker group."""
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
    """Fraction of all steps over which the learning rate rises from 0, rounded to the nearest step (transformers
    rounds up). Set this or warmupSteps."""
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

    @property
    def has_user_code(self) -> bool:
        """Whether a function or a command of the user trains, in place of spotune's training loop."""
        return bool(self.function or self.command)

    @property
    def user_code_field(self) -> str:
        """The field that names the code of the user, for messages."""
        return "training.command" if self.command else "training.function"

    @model_validator(mode="after")
    def _check_user_code(self) -> Self:
        if self.function and self.command:
            invalid("command", "set function or command, not both")
        if self.command and not self.command[0]:
            invalid("command", "has no program: its first entry is empty")
        if "://" in self.code:
            invalid("code", NO_FOLDER)
        if self.code and self.code_from is not None:
            invalid("codeFrom", TWO_CODES)
        if not self.has_user_code:
            for field, value in (("code", self.code), ("codeFrom", self.code_from), ("config", self.config)):
                if value:
                    invalid(field, "is only used by function and command: set one of them, or remove it")
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is None and self.max_steps is None and not self.has_user_code:
            invalid("", "has no length: set epochs, maxSteps, or both")
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
