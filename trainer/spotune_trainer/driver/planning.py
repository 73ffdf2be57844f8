"""The plan of a run: resolved at the first start, read from `plan.json` at later ones."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob, PrepareSpec
from spotune.job_file.load import replace_fields
from spotune.plan.execution import COMPILE_SECONDS, resolve_compile, resolve_minimum, saved_by_compiling
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.commands.locate import missing_user_code
from spotune_trainer.data.datasets import Datasets, open_datasets
from spotune_trainer.data.manifests import MANIFEST
from spotune_trainer.data.mixture_schedule import MixtureSchedule
from spotune_trainer.data.schedule import Schedule
from spotune_trainer.engine.compile.layers import missing_compiler
from spotune_trainer.job_directory.job import has_commits
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan, library_versions, requested
from spotune_trainer.models.pretrained import load_config
from spotune_trainer.user_code.fetch import fetch_code, with_code

logger = logging.getLogger("spotune.driver")

MEGABYTE = 10**6


def unprepared_sources(job: FinetuneJob, directory: JobDirectory) -> dict[str, PrepareSpec]:
    """Raw data that is to be converted to shards, by the name of its source in a mixture; empty without a mixture.

    Shards that a checkpoint was trained on are final, because `dataset` is frozen then. The raw data is not read again,
    and may be gone.
    """
    if job.spec.training.has_user_code:
        return {}
    sources = job.spec.dataset.prepared_sources
    if not has_commits(directory):
        return sources
    return {name: source for name, source in sources.items() if not (directory.prepared(name) / MANIFEST).exists()}


def plan_run(
    job: FinetuneJob, directory: JobDirectory, checkpoint: Checkpoint | None, worker_memory_bytes: Callable[[], int]
) -> RunPlan:
    """The plan of the next worker group: that on the volume, with changes of `execution` applied, or a new one.

    Args:
        job: the job.
        directory: its folder; `plan.json` is written there.
        checkpoint: that the next worker group starts from; None before the first commit, when all may still change.
        worker_memory_bytes: returns the memory of one worker; called only for a new plan.

    Raises:
        JobError: the model, the data or the execution cannot work, or what is trained changed after the first commit.
    """
    if job.spec.training.has_user_code:
        return _plan_of_user_code(job, directory, checkpoint)
    datasets = open_datasets(job, directory)
    value = files.read_json(directory.plan)
    job_fingerprint = fingerprint(job)
    if value is None or (checkpoint is None and value.get("fingerprint") != job_fingerprint):
        plan = _resolve(job, datasets, job_fingerprint, worker_memory_bytes())
    else:
        with files.reading(directory.plan):
            plan = RunPlan.from_json(value)
        _check_fingerprint(plan, job_fingerprint, directory)
        plan.check_data(datasets.index_hashes)
        plan = plan.apply_execution(job.spec.execution, checkpoint.name.step if checkpoint else 0)
    missing = missing_compiler(on_gpus=job.spec.workers.gpus > 0) if plan.compile else None
    if missing:
        fp8 = job.spec.execution.is_fp8
        raise JobError(
            f"execution.compile: torch.compile needs {missing} where the trainer runs: install it, or set "
            f"{f'execution.precision, {job.spec.execution.precision}, to auto' if fp8 else 'it to false'}"
        )
    save_plan(directory, plan)
    _log_mixture(job, datasets)
    return plan


def _plan_of_user_code(job: FinetuneJob, directory: JobDirectory, checkpoint: Checkpoint | None) -> RunPlan:
    """The plan of a job with a training function or command, which decides all but the number of workers itself."""
    code = _read_code(job, directory)
    value, job_fingerprint = files.read_json(directory.plan), fingerprint(job)
    if value is not None and checkpoint is not None:
        with files.reading(directory.plan):
            plan = RunPlan.from_json(value)
        _check_fingerprint(plan, job_fingerprint, directory)
        if plan.code != code:
            plan = replace(plan, code=code)
            save_plan(directory, plan)
        return plan
    plan = RunPlan(
        version=1,
        fingerprint=job_fingerprint,
        zero_stage=0,
        micro_batch_size=1,
        gradient_checkpointing=False,
        function=job.spec.training.function,
        command=shlex.join(job.spec.training.command),
        code=code,
        reason=f"{job.spec.training.user_code_field} decides how it trains",
        data={},
        requested=requested(job.spec.execution),
        libraries=library_versions(),
    )
    save_plan(directory, plan)
    return plan


def _read_code(job: FinetuneJob, directory: JobDirectory) -> str:
    """Read the code of the user from `training.codeFrom`; returns its version, or an empty string.

    Raises:
        JobError: it cannot be read, or lacks the function or the script of the job.
        InfrastructureError: its source cannot be reached.
    """
    version = fetch_code(job, directory)
    problem = missing_user_code(with_code(job, directory, version)) if version else None
    if problem:
        raise JobError(f"{problem.field}: {problem.message}")
    return version


def _check_fingerprint(plan: RunPlan, job_fingerprint: str, directory: JobDirectory) -> None:
    """Raise JobError if the directory holds checkpoints of a job that trains something else."""
    if plan.fingerprint != job_fingerprint:
        raise JobError(
            f"{directory.root} holds checkpoints of another model, data set or training (fingerprint "
            f"{plan.fingerprint[:8]}, this job has {job_fingerprint[:8]}): "
            "undo the change, or start in another directory"
        )


def memory_copies(job: FinetuneJob, plan: RunPlan, world_size: int) -> int:
    """Number of commits that each of `world_size` workers keeps in memory."""
    if job.spec.training.has_user_code:
        return 0
    asked = job.spec.checkpoint.memory_copies
    if asked != "auto":
        return asked
    return 2 if plan.second_copy_from is not None and world_size >= plan.second_copy_from else 1


def peer_copy_rate(job: FinetuneJob, plan: RunPlan, world_size: int) -> int:
    """Bytes per second at which the nodes of `world_size` workers copy commits to one another; 0: they do not."""
    checkpoint, planned = job.spec.checkpoint, plan.peer_copy_from
    fits = planned is not None and world_size >= planned
    copies = memory_copies(job, plan, world_size) > 0 and (
        fits if checkpoint.peer_copy == "auto" else checkpoint.peer_copy
    )
    return checkpoint.peer_copy_rate * MEGABYTE if copies else 0


def save_plan(directory: JobDirectory, plan: RunPlan) -> None:
    """Write `plan.json`."""
    files.write_json(directory.plan, plan.to_json())


def _log_mixture(job: FinetuneJob, datasets: Datasets) -> None:
    """Log the shares of a mixture, and how often the run repeats each source."""
    schedule, training = datasets.schedule, job.spec.training
    if isinstance(schedule, MixtureSchedule):
        for line in schedule.plan.describe(schedule.total_steps(training.epochs, training.max_steps)):
            logger.info("source %s", line)


def _resolve(job: FinetuneJob, datasets: Datasets, job_fingerprint: str, worker_memory_bytes: int) -> RunPlan:
    asked = requested(job.spec.execution)
    can_be_eager = job.spec.execution.compile == "auto" and not job.spec.execution.is_fp8
    config, why_eager = load_config(job).to_dict(), ""
    if can_be_eager and resolve_compile(job):
        why_eager = _why_not_to_compile(config, job, datasets.schedule)
        if why_eager:
            job = replace_fields(job, {"spec.execution.compile": False})
    minimum = resolve_minimum(config, job, worker_memory_bytes)
    execution = minimum.execution
    return RunPlan(
        version=1,
        fingerprint=job_fingerprint,
        zero_stage=execution.zero_stage,
        micro_batch_size=execution.micro_batch_size,
        gradient_checkpointing=execution.gradient_checkpointing,
        compile=execution.compile,
        gathered_layers=execution.gathered_layers,
        whole_gradients=execution.whole_gradients,
        kept_layers=execution.kept_layers,
        offload_activations=execution.offload_activations,
        min_world_size=minimum.world_size,
        second_copy_from=minimum.second_copy_from,
        peer_copy_from=minimum.peer_copy_from,
        reason=f"{execution.reason}; layers not compiled: {why_eager}" if why_eager else execution.reason,
        data=datasets.index_hashes,
        requested=asked,
        libraries=library_versions(),
    )


def _why_not_to_compile(config: Mapping[str, Any], job: FinetuneJob, schedule: Schedule) -> str:
    """Why `compile: auto` leaves layers as they are where it could compile them; empty if it compiles them.

    Only a first start asks: compiled layers round differently, so a run keeps what its plan says. Therefore it does not
    matter here what a cache holds, which another machine may lack.
    """
    if missing := missing_compiler(on_gpus=job.spec.workers.gpus > 0):
        return f"torch.compile needs {missing}"
    steps = schedule.total_steps(job.spec.training.epochs, job.spec.training.max_steps)
    saved = saved_by_compiling(config, job, steps)
    if saved is None or saved > COMPILE_SECONDS:
        return ""
    return f"in {steps} steps that would save {saved:.1f} s, and takes up to {COMPILE_SECONDS:.0f} s"
