"""The FinetuneJob itself, and what spans its parts."""

from typing import Final, Literal, Self

from pydantic import model_validator

from spotune.job.base import Section, invalid
from spotune.job.cluster import ClusterSpec, HeadSpec, StorageSpec, WorkersSpec
from spotune.job.dataset import DatasetSpec
from spotune.job.execution import CheckpointSpec, ExecutionSpec
from spotune.job.lifecycle import CleanupSpec, RetrySpec
from spotune.job.metadata import Metadata
from spotune.job.model import AdapterSpec, ModelSpec
from spotune.job.output import OutputSpec, TrackingSpec
from spotune.job.status import FinetuneJobStatus
from spotune.job.training import EvaluationSpec, TrainingSpec

API_VERSION: Final = "spotune.dev/v1alpha1"
KIND: Final = "FinetuneJob"


class FinetuneJobSpec(Section):
    """What to train (model, adapter, dataset, training) and how (everything else)."""

    model: ModelSpec
    """What model is trained: its source, task and precision. Frozen after the first checkpoint."""
    adapter: AdapterSpec | None = None
    """Parameter-efficient finetuning; absent: all parameters are trained. Frozen after the first checkpoint."""
    dataset: DatasetSpec
    """Training data, how a row becomes text, and what is held out for evaluation. Frozen after the first checkpoint."""
    training: TrainingSpec
    """The optimization and its evaluation; names follow Hugging Face TrainingArguments. Frozen after the first
    checkpoint, but epochs and maxSteps may grow."""
    execution: ExecutionSpec = ExecutionSpec()
    """How the work is laid out on the devices; it may change at any time and applies at the next worker group."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the training state is committed, and how many commits are kept."""
    tracking: TrackingSpec = TrackingSpec()
    """Where loss, throughput and evaluation are logged."""
    output: OutputSpec = OutputSpec()
    """What happens to the trained model; it is always exported into the job's folder."""
    workers: WorkersSpec = WorkersSpec()
    """The worker pods; one GPU is one worker process. Their number may change while the job runs."""
    head: HeadSpec = HeadSpec()
    """The head pod: driver and supervisor, no training."""
    storage: StorageSpec = StorageSpec()
    """The shared volume that holds checkpoints, logs and the trained model."""
    cluster: ClusterSpec = ClusterSpec()
    """What the Ray cluster is made from."""
    retry: RetrySpec = RetrySpec()
    """What counts as failed for good, and the waits between attempts; losses of workers and hangs are never final."""
    suspend: bool = False
    """Commit, stop and give the nodes back; false again: go on."""
    cleanup: CleanupSpec = CleanupSpec()
    """What happens to the Ray cluster of a job that has ended."""

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        dataset = self.dataset
        if self.model.task == "seq2seq":
            if dataset.packing:
                invalid("dataset.packing", "packs documents of causal models only; this job's model.task is seq2seq")
            if dataset.row_format in ("text", "messages"):
                invalid(f"dataset.{dataset.row_format}", "a seq2seq model needs prompt and completion")
        elif dataset.max_completion_length:
            reason = "is for seq2seq models; maxLength bounds prompt and completion together"
            invalid("dataset.maxCompletionLength", reason)
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        evaluation, dataset = self.training.evaluation, self.dataset
        if dataset.eval is None and evaluation != EvaluationSpec():
            invalid("training.evaluation", "has nothing to evaluate on: give dataset.eval a source or a fraction")
        if evaluation.generate and dataset.row_format == "text":
            invalid("training.evaluation.generate", "needs prompts to answer; dataset.text is learned as a whole")
        sql = evaluation.sql
        if sql is not None and dataset.prepare is not None and sql.column not in dataset.keep:
            reason = f"must carry the column {sql.column!r} into the shards, for training.evaluation.sql"
            invalid("dataset.keep", reason)
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if not self.output.merge_adapter:
            if self.adapter is None:
                invalid("output.mergeAdapter", "there is no adapter: leave it out")
            if self.model.initialise == "random":
                reason = "needs the weights it was trained beside, which a model from scratch has nowhere: use true"
                invalid("output.mergeAdapter", f"an adapter alone {reason}")
        if self.adapter is not None and self.adapter.quantization != "none":
            if self.execution.offload == "parameters":
                invalid("execution.offload", f"parameters cannot be {self.adapter.quantization}: use optimizer or none")
            if self.execution.zero_stage == 3:
                invalid(
                    "execution.zeroStage",
                    f"3 cannot shard weights in {self.adapter.quantization}: use auto, or 2 at most",
                )
        at_stage_3 = self.execution.zero_stage == 3 or self.execution.offload == "parameters"
        if self.adapter is not None and self.execution.compile is True and at_stage_3:
            reason = "layers with weights that are not trained cannot be compiled at ZeRO stage 3: use auto or false"
            invalid("execution.compile", reason)
        return self

    @model_validator(mode="after")
    def _check_micro_batch(self) -> Self:
        micro_batch_size = self.execution.micro_batch_size
        if micro_batch_size != "auto" and micro_batch_size > self.training.global_batch_size:
            reason = f"{micro_batch_size} is more than training.globalBatchSize, {self.training.global_batch_size}"
            invalid("execution.microBatchSize", reason)
        return self


class FinetuneJob(Section):
    """A language model, finetuned on spot GPUs until it is trained."""

    api_version: Literal["spotune.dev/v1alpha1"] = API_VERSION
    """Version of this language."""
    kind: Literal["FinetuneJob"] = KIND
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace and labels."""
    spec: FinetuneJobSpec
    """What to train (model, adapter, dataset, training) and how (everything else)."""
    status: FinetuneJobStatus | None = None
    """Progress and health, written by the operator."""
