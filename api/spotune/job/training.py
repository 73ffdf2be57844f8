"""How it is trained: the numbers that decide which weights come out, and how they are evaluated."""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spotune.job.base import NotNegative, Positive, Section, Source, invalid
from spotune.job.metric import BUILT_IN, MAX_METRICS, Metric, is_function, metric_name


class SqlSpec(Section):
    """The databases that generated SQL is run in."""

    databases: Source
    """Folder with one SQLite file <name>.sqlite per database."""
    column: str = "database"
    """Column of the evaluation rows that names the database."""


class EvaluationSpec(Section):
    """When and how the model is evaluated on dataset.eval."""

    every_steps: NotNegative = 0
    """Evaluate every so many steps; 0: only at the end."""
    generate: bool = False
    """Let the model answer the prompts, as all metrics but loss need it."""
    metrics: list[Metric] = Field(default=["loss"], min_length=1, max_length=MAX_METRICS)
    """loss; exactMatch: the answer is the expected text; executionAccuracy: both queries return the same rows;
    package.module:function: the mean of what your function gives for each answer."""
    max_new_tokens: Positive = 128
    """Longest generated answer in tokens."""
    samples: NotNegative = 0
    """Evaluate the first so many samples only; 0: all."""
    batch_size: NotNegative = 0
    """Samples per evaluation batch and worker; 0: four times the micro-batch, but once where ZeRO-3 keeps layers."""
    sql: SqlSpec | None = None
    """Where generated SQL is run, for executionAccuracy."""

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        for metric in self.metrics:
            if metric != "loss" and not self.generate:
                invalid("metrics", f"{metric} compares generated answers: set generate: true")
            if is_function(metric) and metric_name(metric) in BUILT_IN:
                invalid("metrics", f"{metric} has the name of a metric that there is: give the function another one")
        if len(set(self.metrics)) < len(self.metrics):
            invalid("metrics", "names a metric twice")
        names = Counter(map(metric_name, self.metrics))
        [(name, times)] = names.most_common(1)
        if times > 1:
            reason = f"names {times} functions {name}, which their figures go by: give all but one another name"
            invalid("metrics", reason)
        if "executionAccuracy" in self.metrics and self.sql is None:
            invalid("sql", "executionAccuracy runs queries: give sql.databases, a folder of <name>.sqlite files")
        if self.sql is not None and "executionAccuracy" not in self.metrics:
            invalid("sql", "is used by the metric executionAccuracy only, which is not in metrics")
        return self


class TrainingSpec(Section):
    """The optimization; names follow Hugging Face TrainingArguments."""

    epochs: Positive | None = None
    """Passes over the training data; give this or maxSteps, or both."""
    max_steps: Positive | None = None
    """Optimizer steps; where epochs is given too, the smaller of the two ends the training."""
    global_batch_size: Positive = 32
    """Samples per optimizer step over all workers; exact at any number of workers."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """Peak learning rate."""
    scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Learning rate over the steps, by the names of transformers.SchedulerType."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of all steps over which the learning rate rises from 0; give this or warmupSteps."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw: PyTorch's, with float32 moments; adamw8bit: the same with 8-bit block-wise moments."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term in AdamW's denominator for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; biases and normalisation weights are left out."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """The gradient is clipped to this L2 norm; 0: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the probability that is spread over all tokens."""
    shuffle_block_size: NotNegative = 0
    """Samples within which the order is shuffled; larger mixes better and keeps more shards open; 0: about 4 shards."""
    max_bad_steps: NotNegative = 10
    """Consecutive steps whose loss is not finite that are skipped before the run fails."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of data order, dropout and random initialisation."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """When and how the model is evaluated."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is None and self.max_steps is None:
            invalid("", "says nothing about how long: give epochs, maxSteps, or both")
        if self.warmup_ratio and self.warmup_steps:
            invalid("warmupSteps", "give warmupRatio or warmupSteps, not both")
        if self.scheduler == "constant" and (self.warmup_ratio or self.warmup_steps):
            invalid("scheduler", "constant has no warm-up: use constant_with_warmup")
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            invalid("warmupSteps", f"{self.warmup_steps} is more than maxSteps, {self.max_steps}")
        return self
