"""The FinetuneJob itself, and the checks that span its sections."""

import re
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import API_VERSION, Section, changed_from_default, invalid
from spotune.custom_resource.metadata import Metadata
from spotune.job.cluster import ClusterSpec, HeadSpec, WorkersSpec
from spotune.job.dataset import DatasetSpec
from spotune.job.execution import CheckpointSpec, ExecutionSpec, check_precision
from spotune.job.lifecycle import CleanupSpec, RetrySpec, TtlSeconds, check_ttl
from spotune.job.model import AdapterSpec, ModelSpec
from spotune.job.output import OutputSpec, TrackingSpec
from spotune.job.pools import check_queue_and_limit
from spotune.job.serving import JobServingSpec
from spotune.job.status import FinetuneJobStatus
from spotune.job.storage import StorageSpec
from spotune.job.training.evaluation import EvaluationSpec
from spotune.job.training.hyperparameters import (
    FIXED_POINT_EPSILON,
    LABEL_OBJECTIVES,
    WHOLE_MATRIX_OPTIMIZERS,
    TrainingSpec,
)
from spotune.job.training.metric import is_harness_metric, is_iob2
from spotune.units.deadlines import Deadline
from spotune.units.money import Money

KIND: Final = "FinetuneJob"
_REPRODUCIBLE: Final = "execution.reproducible worldSize"

USED_WITH_USER_CODE: Final = {
    "training": ("function", "command", "code", "codeFrom", "config"),
    "checkpoint": ("keep", "keepEverySteps"),
}
"""Fields of these sections that a job with code of the user may set; other sections than these have none."""
NOT_WITH_USER_CODE: Final = "is not used with training.function and training.command: remove it"
MISSING_WITHOUT_USER_CODE: Final = "is required, unless training.function or training.command names code of your own"

ModelKind = Literal["causal", "seq2seq", "reward", "embedding", "classification", "tokenClassification"]


class FinetuneJobSpec(Section):
    """What to train (model, adapter, dataset, training) and how to run it (all other sections)."""

    given_model: ModelSpec | None = Field(default=None, alias="model")
    """The model to train: its source, task and precision. Required unless training has a function or
    command. Frozen after the first checkpoint."""
    adapter: AdapterSpec | None = None
    """Parameter-efficient finetuning. If absent, all parameters are trained. Frozen after the first checkpoint."""
    given_dataset: DatasetSpec | None = Field(default=None, alias="dataset")
    """Training data, how a row becomes text, and what is held out for evaluation. Required unless training has a
    function or command. Frozen after the first checkpoint."""
    training: TrainingSpec
    """Hyperparameters and evaluation. Names follow Hugging Face TrainingArguments. Frozen after the first checkpoint,
    except that epochs and maxSteps may grow."""
    execution: ExecutionSpec = ExecutionSpec()
    """How the work is distributed over the devices. It may change at any time and applies to the next worker group,
    except precision, which is frozen after the first checkpoint."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often checkpoints are saved, and how many are kept."""
    tracking: TrackingSpec = TrackingSpec()
    """Where loss, throughput and evaluation results are logged."""
    output: OutputSpec = OutputSpec()
    """What happens to the trained model. It is always exported into the job's folder."""
    workers: WorkersSpec = WorkersSpec()
    """The worker pods. Each GPU runs one worker process. Their number may change while the job runs."""
    head: HeadSpec = HeadSpec()
    """The head pod. It runs the driver and the supervisor, and does no training."""
    storage: StorageSpec = StorageSpec()
    """Where checkpoints, logs and the trained model are kept: on a shared volume, or in a bucket."""
    cluster: ClusterSpec = ClusterSpec()
    """Settings of the Ray cluster."""
    retry: RetrySpec = RetrySpec()
    """When a job has failed for good, and the waits between attempts. Lost workers and hangs are always retried."""
    deadline: Deadline | None = None
    """When training has to be finished: a time (RFC 3339), or a duration from the creation of the job such as 36h."""
    max_cost: Money | None = None
    """Most that the workers may cost, with its currency, such as 120 USD. Then they stop; raise it to continue."""
    suspend: bool = False
    """true: save a checkpoint, stop and release the nodes. false: resume."""
    cleanup: CleanupSpec = CleanupSpec()
    """What happens to the Ray cluster after the job has ended."""
    ttl_seconds_after_finished: TtlSeconds | None = None
    """Seconds after its end at which the job is deleted, with what a deletion takes along."""
    serving: JobServingSpec | None = None
    """Creates a ModelService when the model is trained. It may change at any time. Removing it, or deleting the job,
    deletes the ModelService. On one machine it is ignored: use spotune serve."""

    @property
    def model(self) -> ModelSpec:
        """The model of a job without code of the user."""
        assert self.given_model is not None, "a job with code of the user has no model"
        return self.given_model

    @property
    def dataset(self) -> DatasetSpec:
        """The data of a job without code of the user."""
        assert self.given_dataset is not None, "a job with code of the user has no dataset"
        return self.given_dataset

    @property
    def prepares_data(self) -> bool:
        """Whether raw data becomes shards before training."""
        return self.given_dataset is not None and bool(self.given_dataset.prepared_sources)

    @property
    def model_kind(self) -> ModelKind:
        """What the trained model is: a language model of model.task, or what the objective makes of it."""
        objective = self.training.objective
        return objective if objective in ("reward", "embedding", *LABEL_OBJECTIVES) else self.model.task

    @property
    def generates_text(self) -> bool:
        """Whether the trained model is a language model, with a projection to the vocabulary."""
        return self.model_kind in ("causal", "seq2seq")

    @property
    def has_head(self) -> bool:
        """Whether the model has a head for scores or labels. A model with embeddings has none."""
        return self.model_kind in ("reward", *LABEL_OBJECTIVES)

    @model_validator(mode="after")
    def _check_sections_together(self) -> Self:
        check_ttl(self.ttl_seconds_after_finished, self.serving)
        check_queue_and_limit(self.workers.pools, self.cluster.queue_name, self.max_cost)
        if self.training.has_user_code:
            self._check_user_code()
            return self
        for field, section in (("model", self.given_model), ("dataset", self.given_dataset)):
            if section is None:
                invalid(field, MISSING_WITHOUT_USER_CODE)
        self._check_task()
        self._check_unused_columns()
        self._check_objective()
        self._check_evaluation()
        self._check_harness()
        self._check_adapter()
        self._check_optimizer()
        self._check_reproducible()
        on_gpus = self.workers.gpus > 0
        check_precision(self.execution, self.model, self.adapter, self.training.objective, on_gpus=on_gpus)
        self._check_storage()
        self._check_serving()
        self._check_micro_batch()
        return self

    def _check_user_code(self) -> None:
        """Raise for sections that a function or command of the user does not read."""
        for name in ("given_model", "given_dataset", "adapter", "serving"):
            if getattr(self, name) is not None:
                invalid(name.removeprefix("given_"), NOT_WITH_USER_CODE)
        for name in ("training", "execution", "checkpoint", "output"):
            for field in changed_from_default(getattr(self, name)):
                if field not in USED_WITH_USER_CODE.get(name, ()):
                    invalid(f"{name}.{field}", NOT_WITH_USER_CODE)

    def _check_task(self) -> None:
        dataset = self.dataset
        if self.model.task == "seq2seq":
            if dataset.packing:
                invalid("dataset.packing", "is only supported for causal models; model.task is seq2seq")
            if dataset.row_format in ("text", "messages"):
                reason = "is not supported for seq2seq models: use prompt and completion"
                invalid(f"dataset.{dataset.row_format}", reason)
        elif dataset.max_completion_length:
            reason = "is only used by seq2seq models; for causal models maxLength limits prompt and completion together"
            invalid("dataset.maxCompletionLength", reason)

    def _check_unused_columns(self) -> None:
        objective, dataset = self.training.objective, self.dataset
        if objective == "sft" and dataset.chosen:
            invalid(
                "training.objective", "sft does not use dataset.chosen and rejected: use dpo, orpo, simpo or reward"
            )
        if objective not in ("kto", *LABEL_OBJECTIVES) and dataset.label:
            reason = f"is not used by {objective}: set training.objective to kto, classification or tokenClassification"
            invalid("dataset.label", reason)
        if objective not in LABEL_OBJECTIVES and dataset.labels:
            reason = f"is not used by {objective}: set training.objective to classification or tokenClassification"
            invalid("dataset.labels", reason)
        if objective != "embedding" and dataset.query:
            invalid("dataset.query", f"is only used by embedding; training.objective is {objective}")

    def _check_objective(self) -> None:
        objective = self.training.objective
        if objective == "sft":
            return
        if self.model.task == "seq2seq":
            invalid("training.objective", f"{objective} is for causal models; model.task is seq2seq")
        match objective:
            case "kto":
                self._check_labelled_answers()
            case "embedding":
                self._check_embedding()
            case "classification" | "tokenClassification":
                self._check_labelled_texts()
            case _:
                self._check_pairs()
        if self.training.evaluation.generate:
            invalid("training.evaluation.generate", f"is not supported for {objective}: remove it")
        if not self.generates_text:
            self._check_without_text()

    def _check_pairs(self) -> None:
        """Raise if the row format is not that of pairs, or a reward model would get packed ones."""
        row_format, objective = self.dataset.row_format, self.training.objective
        if row_format not in ("chosen", None):
            reason = f"{objective} learns from pairs: replace it by dataset.chosen and dataset.rejected"
            invalid(f"dataset.{row_format}", reason)
        if objective == "reward" and self.dataset.packing:
            reason = "is not supported for reward, which scores each answer in its own row: remove it"
            invalid("dataset.packing", reason)

    def _check_labelled_answers(self) -> None:
        """Raise if the row format is not that of kto: an answer, and whether it is desirable."""
        dataset = self.dataset
        if dataset.row_format in ("chosen", "text"):
            reason = (
                "kto learns from answers with a label: set prompt, completion and label instead, or messages and label"
            )
            invalid(f"dataset.{dataset.row_format}", reason)
        if dataset.row_format is not None and not dataset.label:
            invalid("dataset.label", "is required by kto: set the column that says whether an answer is desirable")
        if dataset.packing:
            invalid("dataset.packing", "is not supported for kto, whose labels belong to one row each: remove it")
        if dataset.train_on == "all":
            invalid("dataset.trainOn", "all is not supported for kto, which learns from the last message: remove it")

    def _check_embedding(self) -> None:
        """Raise if the row format is not that of texts with embeddings, or for an adapter."""
        dataset = self.dataset
        if dataset.row_format not in ("query", None):
            reason = "embedding learns from texts: set query and positive instead"
            invalid(f"dataset.{dataset.row_format}", reason)
        if self.adapter is not None:
            invalid("adapter", "is not supported for embedding: remove it")

    def _check_labelled_texts(self) -> None:
        """Raise unless the dataset has labels, and rows that carry them."""
        objective, dataset = self.training.objective, self.dataset
        if dataset.row_format not in ("text", None):
            reason = f"{objective} learns labels of texts: replace it by dataset.text and dataset.label"
            invalid(f"dataset.{dataset.row_format}", reason)
        if not dataset.labels:
            invalid("dataset.labels", f"is required by {objective}: name all labels, such as [negative, positive]")
        if bool(dataset.text) != bool(dataset.label):
            missing = "label" if dataset.text else "text"
            invalid(f"dataset.{missing}", f"{objective} needs text and label together: name the column, or remove both")
        if objective == "tokenClassification" and re.search("[{}]", dataset.text.strip("{}")):
            invalid(
                "dataset.text", 'must be one column with lists of words for tokenClassification, such as "{tokens}"'
            )
        if dataset.packing:
            invalid("dataset.packing", f"is not supported for {objective}: remove it")
        best = self.training.evaluation.best
        if best is not None and best.metric == "entityF1" and not is_iob2(dataset.labels):
            reason = "entityF1 needs labels in IOB2 format (O, B-TYPE, I-TYPE): use accuracy, or other labels"
            invalid("training.evaluation.best.metric", reason)

    def _check_without_text(self) -> None:
        """Raise for sections that work on a language model only."""
        kind = self.model_kind
        if self.serving is not None:
            invalid("serving", f"is not supported for {kind}: the model generates no text")
        if self.execution.compile is True:
            invalid("execution.compile", f"is not supported for {kind}: use auto or false")
        if self.has_head and not self.output.merge_adapter:
            invalid("output.mergeAdapter", f"false is not supported for {kind}: the head is exported with the model")

    def _check_evaluation(self) -> None:
        evaluation, dataset = self.training.evaluation, self.dataset
        best = evaluation.best
        of_tasks = ["harness", *(["best", "early_stopping"] if best and is_harness_metric(best.metric) else [])]
        of_data = evaluation.model_copy(update=dict.fromkeys(of_tasks))
        if not dataset.has_evaluation and of_data != EvaluationSpec():
            invalid("training.evaluation", "has no evaluation data: set dataset.eval.source or dataset.eval.fraction")
        if evaluation.generate and dataset.row_format == "text":
            invalid(
                "training.evaluation.generate",
                "requires prompts, and dataset.text has none: use dataset.prompt and dataset.completion",
            )
        if self.output.export == "best" and evaluation.best is None:
            invalid("output.export", "best requires evaluations that are compared: set training.evaluation.best")
        sql = evaluation.sql
        prepared = dataset.prepare is not None or dataset.prepared_sources
        if sql is not None and prepared and sql.column not in dataset.keep:
            reason = f"must contain the column {sql.column!r}, which training.evaluation.sql.column names"
            invalid("dataset.keep", reason)

    def _check_harness(self) -> None:
        if self.training.evaluation.harness is not None:
            field = "training.evaluation.harness"
            if not self.generates_text:
                reason = f"{self.model_kind} trains a model that generates no text: remove it"
                invalid(field, f"evaluates language models, and {reason}")
            if not self.output.merge_adapter:
                invalid(field, "evaluates a whole model, not an adapter alone: set output.mergeAdapter to true")

    def _check_adapter(self) -> None:
        if not self.output.merge_adapter:
            if self.adapter is None:
                invalid("output.mergeAdapter", "false requires an adapter: remove this field, or set spec.adapter")
            if self.model.initialise == "random":
                reason = (
                    "must be true for a randomly initialised model, because its base weights are stored nowhere else"
                )
                invalid("output.mergeAdapter", reason)
        if self.adapter is not None and self.adapter.quantization != "none":
            if self.execution.offload == "parameters":
                invalid(
                    "execution.offload",
                    f"parameters cannot be offloaded with {self.adapter.quantization} weights: use optimizer or none",
                )
            if self.execution.zero_stage == 3:
                reason = f"3 cannot shard {self.adapter.quantization} weights: use auto or at most 2"
                invalid("execution.zeroStage", reason)
        at_stage_3 = self.execution.zero_stage == 3 or self.execution.offload == "parameters"
        if self.adapter is not None and self.execution.compile is True and at_stage_3:
            reason = "layers with frozen weights cannot be compiled at ZeRO stage 3: use auto or false"
            invalid("execution.compile", reason)

    def _check_optimizer(self) -> None:
        optimizer, execution = self.training.optimizer, self.execution
        if optimizer in WHOLE_MATRIX_OPTIMIZERS:
            if execution.offload != "none":
                reason = (
                    f"{execution.offload} is not supported for {optimizer}: use none, or another training.optimizer"
                )
                invalid("execution.offload", reason)
            if execution.zero_stage == 3:
                reason = f"3 cuts every matrix, but {optimizer} updates whole matrices: use auto or at most 2"
                invalid("execution.zeroStage", reason)
        if optimizer == "muon" and self.adapter is not None:
            reason = "muon is for whole weight matrices, not for those of an adapter: use another optimizer"
            invalid("training.optimizer", reason)

    def _check_reproducible(self) -> None:
        training = self.training
        if self.execution.reproducible == "worldSize":
            if training.optimizer != "adamw":
                invalid("training.optimizer", f"{training.optimizer} is not supported for {_REPRODUCIBLE}: use adamw")
            if training.adam_epsilon < FIXED_POINT_EPSILON:
                reason = f"must be at least {FIXED_POINT_EPSILON:g} for {_REPRODUCIBLE}, which rounds gradients"
                invalid("training.adamEpsilon", reason)
            if self.model.dtype == "float16":
                invalid("model.dtype", f"float16 is not supported for {_REPRODUCIBLE}: use bfloat16 or float32")

    def _check_storage(self) -> None:
        storage, of_data = self.storage, self.dataset.credentials
        endpoints = {each.endpoint for each in (storage.credentials, of_data) if each is not None and each.endpoint}
        if len(endpoints) > 1:
            reason = "differs from dataset.credentials.endpoint, and pods have one: keep data and state in one store"
            invalid("storage.credentials.endpoint", reason)
        if self.serving is not None and storage.bucket and not storage.bucket.startswith("s3://"):
            invalid("serving", "reads models from s3:// only: use such a storage.bucket, or a volume")

    def _check_serving(self) -> None:
        if self.serving is not None and not self.output.merge_adapter:
            reason = (
                "cannot serve an adapter without its base model: set output.mergeAdapter to true, or write a "
                "ModelService with the base model and this job under adapters"
            )
            invalid("serving", reason)

    def _check_micro_batch(self) -> None:
        size, batch = self.execution.micro_batch_size, self.training.global_batch_size
        if size != "auto" and size > batch:
            invalid("execution.microBatchSize", f"{size} is more than training.globalBatchSize, {batch}")


class FinetuneJob(Section):
    """A language model finetuning job that runs on spot GPUs until the model is trained."""

    api_version: Literal["spotune.dev/v1alpha1"] = API_VERSION
    """API version."""
    kind: Literal["FinetuneJob"] = KIND
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace and labels."""
    spec: FinetuneJobSpec
    """What to train (model, adapter, dataset, training) and how to run it (all other sections)."""
    status: FinetuneJobStatus | None = None
    """Progress and health, written by the operator."""

    @property
    def service_name(self) -> str:
        """Name of the ModelService of the job; empty without spec.serving."""
        serving = self.spec.serving
        return "" if serving is None else serving.name or self.metadata.name

    @model_validator(mode="after")
    def _check_model_ids(self) -> Self:
        serving = self.spec.serving
        if serving is not None and self.service_name in (adapter.name for adapter in serving.adapters):
            reason = f"must not contain the model's own id {self.service_name!r}: every adapter needs its own name"
            invalid("spec.serving.adapters", reason)
        return self
