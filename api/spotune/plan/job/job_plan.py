"""The plan of a job for several numbers of workers, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.plan.architecture import Architecture
from spotune.plan.checkpoint_interval import (
    checkpoint_bytes,
    checkpoint_interval_seconds,
    expected_steps_lost,
    lost_fraction,
    mean_seconds_between_failures,
)
from spotune.plan.execution import layout_request, training_setup
from spotune.plan.layout import LayoutChoice, choose_layout, passes_per_step
from spotune.plan.parameters import ParameterCount, count_parameters
from spotune.plan.speed.gpus import gpu_speed
from spotune.plan.speed.step_time import StepTime, estimate_step_time
from spotune.plan.training_setup import TrainingSetup
from spotune.units.durations import Duration

ONE_PASS_OBJECTIVES = ("sft", "classification", "tokenClassification")
"""Objectives whose step is one forward and one backward pass of each row."""


@dataclass(frozen=True)
class Device:
    """The device of one worker: a description for display, its memory in bytes, and the name of a known GPU."""

    description: str
    memory_bytes: int
    gpu: str | None = None


@dataclass(frozen=True)
class Assumptions:
    """Values that the plan has to assume.

    Attributes:
        mean_seconds_to_preemption: mean time until one worker is preempted.
        storage_bytes_per_second: write bandwidth of the shared volume, over all workers.
        step_seconds: seconds per optimizer step, if measured.
        documents_per_row: documents that are packed into a row, on average.
    """

    mean_seconds_to_preemption: float
    storage_bytes_per_second: int
    step_seconds: float | None = None
    documents_per_row: float = 1.0


@dataclass(frozen=True)
class CheckpointPlan:
    """How often checkpoints are written, and the expected cost of a failure.

    Attributes:
        size_bytes: size of one checkpoint, over all workers.
        save_seconds: time to write it, as if training waited for it.
        interval_seconds: training time between two checkpoints; None if the job sets steps and `step_seconds` is None.
        interval_steps: the same in steps; None if `step_seconds` is None.
        seconds_lost: training time lost per failure, on average.
        steps_lost: the same in steps.
        lost_fraction: fraction of all time spent on saving and on repeating lost steps, from 0 to 1.
    """

    size_bytes: int
    save_seconds: float
    interval_seconds: float | None
    interval_steps: int | None
    seconds_lost: float | None
    steps_lost: float | None
    lost_fraction: float | None


@dataclass(frozen=True)
class WorkersPlan:
    """The plan for one number of workers. If no layout fits, `choice` is None and `problem` is the reason.

    `step` is the estimated time of an optimizer step, and None where it is not known (see `_step_time`). `max_steps` is
    the number of steps of the run, if the job sets it.
    """

    world_size: int
    device: Device
    choice: LayoutChoice | None
    accumulation: int
    checkpoint: CheckpointPlan
    problem: str = ""
    step: StepTime | None = None
    max_steps: int | None = None

    @property
    def run_seconds(self) -> float | None:
        """Estimated time of all steps, without starts, commits and evaluations."""
        return self.step.seconds * self.max_steps if self.step and self.max_steps else None


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job for each requested number of workers."""

    name: str
    model: str
    architecture: Architecture
    parameters: ParameterCount
    setup: TrainingSetup
    assumptions: Assumptions
    workers: tuple[WorkersPlan, ...]

    @property
    def feasible(self) -> bool:
        """Whether the job can run with at least one of the numbers of workers."""
        return any(plan.choice is not None for plan in self.workers)

    def as_json(self) -> dict[str, Any]:
        """The plan with camelCase keys; sizes in bytes, times in seconds, unknown values null."""
        counts = self.parameters
        return {
            "job": self.name,
            "model": {
                "source": self.model,
                "modelType": self.architecture.model_type,
                "parameters": counts.total,
                "trainedParameters": self.setup.trained.count,
                "embeddingParameters": counts.embedding,
                "encoderParameters": counts.encoder,
                "decoderParameters": counts.decoder,
                "outputParameters": counts.output,
            },
            "globalBatchSize": self.setup.global_batch_size,
            "sequenceLength": self.setup.sequence_length,
            "targetLength": self.setup.target_length,
            "assumed": {
                "meanSecondsToPreemption": self.assumptions.mean_seconds_to_preemption,
                "storageBytesPerSecond": self.assumptions.storage_bytes_per_second,
                "stepSeconds": self.assumptions.step_seconds,
                "documentsPerRow": self.assumptions.documents_per_row,
            },
            "workers": [workers_json(plan, compiled=self.setup.compiled) for plan in self.workers],
        }


def plan_job(
    job: FinetuneJob, architecture: Architecture, devices: Mapping[int, Device], assumptions: Assumptions
) -> JobPlan:
    """Plan `job` for each number of workers in `devices`, on the given device."""
    setup = replace(training_setup(architecture, job), documents_per_row=assumptions.documents_per_row)
    parameters = count_parameters(setup.architecture, pretrained=setup.pretrained)
    trained = setup.trained.count
    plans = [_plan_workers(job, setup, trained, count, device, assumptions) for count, device in devices.items()]
    return JobPlan(
        name=job.metadata.name,
        model=job.spec.model.source,
        architecture=architecture,
        parameters=parameters,
        setup=setup,
        assumptions=assumptions,
        workers=tuple(plans),
    )


def _plan_workers(
    job: FinetuneJob, setup: TrainingSetup, parameters: int, world_size: int, device: Device, assumptions: Assumptions
) -> WorkersPlan:
    size = checkpoint_bytes(parameters, setup.precision.checkpoint_bytes)
    checkpoint = _plan_checkpoints(job, size, world_size, assumptions)
    try:
        choice = choose_layout(setup, world_size, device.memory_bytes, layout_request(job, world_size))
    except JobError as error:
        return WorkersPlan(world_size, device, None, 0, checkpoint, str(error))
    accumulation = passes_per_step(setup.global_batch_size, world_size, choice.layout.micro_batch_size)
    step = _step_time(job, setup, choice, world_size, device)
    max_steps = job.spec.training.max_steps
    return WorkersPlan(world_size, device, choice, accumulation, checkpoint, step=step, max_steps=max_steps)


def _step_time(
    job: FinetuneJob, setup: TrainingSetup, choice: LayoutChoice, world_size: int, device: Device
) -> StepTime | None:
    """The estimated time of a step; None for unknown GPUs, and for objectives that pass a sample more than once."""
    gpu = gpu_speed(device.gpu, job.spec.model.dtype) if device.gpu else None
    if gpu is None or job.spec.training.objective not in ONE_PASS_OBJECTIVES:
        return None
    return estimate_step_time(setup, choice.layout, world_size, gpu)


def _plan_checkpoints(job: FinetuneJob, size: int, world_size: int, assumptions: Assumptions) -> CheckpointPlan:
    save_seconds = size / assumptions.storage_bytes_per_second
    failures_apart = mean_seconds_between_failures(assumptions.mean_seconds_to_preemption, world_size)
    step_seconds = assumptions.step_seconds
    every = job.spec.checkpoint.every
    seconds: float | None
    if every == "auto":
        seconds = checkpoint_interval_seconds(save_seconds, failures_apart)
    elif isinstance(every, Duration):
        seconds = every.seconds
    else:
        seconds = every * step_seconds if step_seconds else None
    return CheckpointPlan(
        size_bytes=size,
        save_seconds=save_seconds,
        interval_seconds=seconds,
        interval_steps=_interval_steps(every, seconds, step_seconds),
        seconds_lost=seconds / 2 if seconds else None,
        steps_lost=expected_steps_lost(seconds, step_seconds) if seconds and step_seconds else None,
        lost_fraction=lost_fraction(seconds, save_seconds, failures_apart) if seconds else None,
    )


def _interval_steps(every: str | int, seconds: float | None, step_seconds: float | None) -> int | None:
    if isinstance(every, int):
        return every
    return max(1, round(seconds / step_seconds)) if seconds and step_seconds else None


def workers_json(plan: WorkersPlan, *, compiled: bool) -> dict[str, Any]:
    """The plan for one number of workers with camelCase keys."""
    checkpoint = plan.checkpoint
    return {
        "workers": plan.world_size,
        "device": {"description": plan.device.description, "memoryBytes": plan.device.memory_bytes},
        "fits": plan.choice is not None and plan.choice.fits,
        "reason": plan.choice.reason if plan.choice else plan.problem,
        "layout": _layout_json(plan.choice, plan.accumulation, compiled=compiled) if plan.choice else None,
        "memoryPerWorker": _memory_json(plan.choice) if plan.choice else None,
        "stepSeconds": plan.step.seconds if plan.step else None,
        "tokensPerSecond": plan.step.tokens_per_second if plan.step else None,
        "mfu": plan.step.mfu if plan.step else None,
        "runSeconds": plan.run_seconds,
        "checkpoint": {
            "bytes": checkpoint.size_bytes,
            "saveSeconds": checkpoint.save_seconds,
            "intervalSeconds": checkpoint.interval_seconds,
            "intervalSteps": checkpoint.interval_steps,
            "expectedSecondsLostPerFailure": checkpoint.seconds_lost,
            "expectedStepsLostPerFailure": checkpoint.steps_lost,
            "lostFraction": checkpoint.lost_fraction,
        },
    }


def _layout_json(choice: LayoutChoice, accumulation: int, *, compiled: bool) -> dict[str, Any]:
    return {
        "zeroStage": choice.layout.zero_stage,
        "microBatchSize": choice.layout.micro_batch_size,
        "accumulation": accumulation,
        "gradientCheckpointing": choice.layout.gradient_checkpointing,
        "keptLayers": choice.layout.kept_layers,
        "offloadActivations": choice.layout.offload_activations,
        "compile": compiled,
        "gatheredLayers": choice.layout.gathered_layers,
        "wholeGradients": choice.layout.whole_gradients,
        "memoryCopies": choice.memory_copies,
        "peerCopy": choice.peer_copy,
    }


def _memory_json(choice: LayoutChoice) -> dict[str, int]:
    memory = choice.memory
    return {
        "weightsBytes": memory.states.weights_bytes,
        "gradientsBytes": memory.states.gradients_bytes,
        "optimizerBytes": memory.states.optimizer_bytes,
        "activationsBytes": memory.activations.layers_bytes,
        "logitsOrRecomputationBytes": memory.activations.working_bytes,
        "reductionBytes": memory.reduction_bytes,
        "optimizerStepBytes": memory.step_bytes,
        "buffersBytes": memory.buffers_bytes,
        "runtimeBytes": memory.runtime_bytes,
        "commitBytes": memory.commit_bytes,
        "totalBytes": memory.total_bytes,
        "hostBytes": memory.host_bytes,
    }
