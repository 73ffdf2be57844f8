"""What all parts of a rank's training share: job, plan, data, engine and process group. Built once, by set-up."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from spotune.job import FinetuneJob
from spotune.plan.activations import keeps_attention_output
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.data.datasets import Datasets, open_datasets
from spotune_trainer.data.joined_shards import JoinedShards
from spotune_trainer.data.loader import MicroBatchLoader
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.engine.build import EngineConfig, build_engine, streams_states
from spotune_trainer.engine.compile.compiled_code import CompiledCode
from spotune_trainer.engine.compile.layers import PAD_TO_MULTIPLE_OF
from spotune_trainer.engine.determinism import use_deterministic_kernels
from spotune_trainer.engine.process_groups import extend_timeouts
from spotune_trainer.evaluation.metrics import build_metrics
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.models.flops import ModelShape
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.mfu_meter import MfuMeter
from spotune_trainer.models.packed_attention import enable_packed_attention
from spotune_trainer.models.pretrained import (
    DTYPES,
    build_model,
    build_uninitialized,
    check_vocabulary,
    load_config,
    load_tokenizer,
)
from spotune_trainer.objectives.build import training_objective
from spotune_trainer.objectives.reference import ReferenceLogProbs, reference_folder
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask


@dataclass(frozen=True)
class References:
    """Log-probabilities of the reference model, by the data that they are of; None without such data or model."""

    train: ReferenceLogProbs | None = None
    evaluation: ReferenceLogProbs | None = None


@dataclass(frozen=True)
class TrainContext:
    """State of one rank that does not change from set-up to export.

    Attributes:
        task: what the driver asked of this generation.
        job: `task.job`, validated.
        plan: `task.plan`, parsed.
        directory: the job's folder on the volume.
        rank: of this process, 0-based.
        world_size: number of ranks.
        reporter: writes progress, step records and events.
        control: gloo group of all ranks, for collectives on small host tensors.
        datasets: training and evaluation rows, and the schedule of samples.
        tokenizer: of the model.
        total_steps: optimizer steps of the whole run.
        references: log-probabilities of the reference model, of the training and of the evaluation pairs; empty if the
            objective has none.
        loader: this rank's micro-batches, from `first_step` on.
        accumulation: forward passes of each rank in a step.
        micro_batches: of a step over all ranks; the last step of an epoch may have fewer.
        mfu_meter: counts floating-point operations.
        compiled: code that torch.compile has made; None if the plan does not compile.
        engine: DeepSpeed's engine around the model.
    """

    task: WorkerTask
    job: FinetuneJob
    plan: RunPlan
    directory: JobDirectory
    rank: int
    world_size: int
    reporter: ProgressReporter
    control: Any
    datasets: Datasets
    tokenizer: Any
    total_steps: int
    references: References
    loader: MicroBatchLoader
    accumulation: int
    micro_batches: int
    mfu_meter: MfuMeter
    compiled: CompiledCode | None
    engine: Any

    @property
    def restore_from(self) -> CheckpointName | None:
        """Checkpoint that this generation starts from; None if it starts from the beginning."""
        return restore_from(self.task)

    @property
    def first_step(self) -> int:
        """Optimizer steps done before this generation."""
        return self.restore_from.step if self.restore_from else 0

    def release_engine(self) -> None:
        """Drop the engine, whose memory the export needs. Nothing may use `engine` afterwards."""
        object.__setattr__(self, "engine", None)


def restore_from(task: WorkerTask) -> CheckpointName | None:
    """Checkpoint that a generation starts from; None if it starts from the beginning."""
    return CheckpointName.parse(task.restore) if task.restore else None


def open_references(job: FinetuneJob, directory: JobDirectory, datasets: Datasets) -> References:
    """Where the reference model's log-probabilities of a job's pairs are, or will be."""
    if not training_objective(job.spec.training).needs_reference:
        return References()
    model = job.spec.model.model_dump(mode="json", exclude={"token_secret_ref", "tokenizer"})
    model["quantization"] = job.spec.adapter.quantization if job.spec.adapter else "none"
    model["seed"] = job.spec.training.seed if job.spec.model.initialise == "random" else None

    def of(dataset: ShardedDataset | JoinedShards) -> ReferenceLogProbs:
        return ReferenceLogProbs(reference_folder(directory.reference, model, dataset.index_hash), dataset.num_samples)

    evaluation = datasets.evaluation
    return References(of(datasets.train), of(evaluation) if evaluation is not None else None)


def build_context(
    task: WorkerTask, job: FinetuneJob, rank: int, world_size: int, reporter: ProgressReporter
) -> TrainContext:
    """Set up process groups, data, model and engine of one rank. All ranks call it together.

    The seconds that each part takes are recorded with `reporter`.

    Raises:
        JobError: the model, the data or the metrics of the job cannot be used.
    """
    training = job.spec.training
    plan, directory = RunPlan.from_json(task.plan), task.job_directory
    use_deterministic_kernels(enabled=job.spec.execution.has_deterministic_kernels)
    if torch.cuda.is_available():
        threading.Thread(target=_warm_up_device, name="warm-up", daemon=True).start()
    compiled: CompiledCode | None = None
    if plan.compile:
        compiled = CompiledCode(job, plan, load_config(job), directory, task.generation, rank, reporter)
    control: Any = distributed.new_group(backend="gloo")
    extend_timeouts(job.spec.retry.hang_timeout.seconds, distributed.group.WORLD, control)
    build_metrics(training.evaluation)  # checked here too: this node may have other packages than the driver's

    datasets = open_datasets(job, directory)
    reporter.record_startup("data")
    tokenizer = load_tokenizer(job)
    total_steps = datasets.schedule.total_steps(training.epochs, training.max_steps)
    restored = restore_from(task)
    references = open_references(job, directory, datasets)
    loader = build_loader(
        job, plan, datasets, references, tokenizer, rank, world_size, restored.step if restored else 0, total_steps
    )
    loader.prefetch()

    model, shape = _build_model(job, plan, tokenizer, is_restored=restored is not None)
    reporter.record_startup("model")

    micro_batches = -(-training.global_batch_size // plan.micro_batch_size)
    config = _engine_config(job, plan, shape, micro_batches, world_size)
    engine = build_engine(model, training, config)
    extend_timeouts(job.spec.retry.hang_timeout.seconds, engine.data_parallel_group)
    engine.train()
    return TrainContext(
        task=task,
        job=job,
        plan=plan,
        directory=directory,
        rank=rank,
        world_size=world_size,
        reporter=reporter,
        control=control,
        datasets=datasets,
        tokenizer=tokenizer,
        total_steps=total_steps,
        references=references,
        loader=loader,
        accumulation=config.accumulation,
        micro_batches=micro_batches,
        mfu_meter=MfuMeter.for_this_device(shape, job.spec.model.dtype),
        compiled=compiled,
        engine=engine,
    )


def _build_model(job: FinetuneJob, plan: RunPlan, tokenizer: Any, *, is_restored: bool) -> tuple[Any, ModelShape]:
    """The model with its adapter, if the job has one, and the shape of the model without it."""
    adapter = job.spec.adapter
    if is_restored and adapter is None:  # A checkpoint replaces all weights. One of an adapter has no frozen weights.
        model = build_uninitialized(job, _device_of_parameters(job, plan))
    else:
        model = build_model(job, quantized=adapter is not None and adapter.quantization == "nf4")
    if job.spec.execution.attention == "auto" and job.spec.generates_text:  # others have no packed rows
        enable_packed_attention(model)
    check_vocabulary(model.config, tokenizer)
    shape = ModelShape.from_model(model, frozen=adapter is not None)
    return attach_adapter(model, job), shape


def _engine_config(
    job: FinetuneJob, plan: RunPlan, shape: ModelShape, micro_batches: int, world_size: int
) -> EngineConfig:
    """What the engine takes from job and plan, for steps of that many micro-batches over all ranks."""
    execution = job.spec.execution
    return EngineConfig(
        zero_stage=plan.zero_stage,
        micro_batch_size=plan.micro_batch_size,
        accumulation=-(-micro_batches // world_size),
        dtype=DTYPES[job.spec.model.dtype],
        gradient_checkpointing=plan.gradient_checkpointing,
        kept_layers=plan.kept_layers,
        saves_attention=keeps_attention_output(
            job.spec.dataset.max_length, shape.hidden_size, compiled=plan.compile, offload=plan.offload_activations
        ),
        offload_activations=plan.offload_activations,
        offload=execution.offload,
        compile=plan.compile,
        gathered_layers=plan.gathered_layers,
        whole_gradients=plan.whole_gradients,
        fixed_point_terms=micro_batches if execution.reproducible == "worldSize" else 0,
        precision=execution.precision,
    )


def _warm_up_device() -> None:
    """Create the CUDA context and load cuBLAS, half a second of the start, while the rank opens its data."""
    matrix = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.mm(matrix, matrix)


def _device_of_parameters(job: FinetuneJob, plan: RunPlan) -> torch.device:
    """Where the engine will need the whole model: stage 3 and the processor's step take it from host memory."""
    offload, dtype = job.spec.execution.offload, DTYPES[job.spec.model.dtype]
    steps_there = offload == "none" or streams_states(job.spec.training, dtype, plan.zero_stage, offload)
    is_whole_on_gpu = torch.cuda.is_available() and plan.zero_stage < 3 and steps_there
    return torch.device("cuda", torch.cuda.current_device()) if is_whole_on_gpu else torch.device("cpu")


def build_loader(
    job: FinetuneJob,
    plan: RunPlan,
    datasets: Datasets,
    references: References,
    tokenizer: Any,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
) -> MicroBatchLoader:
    """Loader of a rank's micro-batches for steps `first_step` up to, but not including, `last_step`, both 0-based."""
    return MicroBatchLoader(
        datasets.train,
        datasets.schedule,
        job.spec.model.task,
        tokenizer.pad_token_id,
        plan.micro_batch_size,
        rank,
        world_size,
        first_step=first_step,
        last_step=last_step,
        pad_to_multiple_of=PAD_TO_MULTIPLE_OF if plan.compile else 1,
        reference_log_probs=references.train,
    )
