"""Resolve a job's plan at its first start, and follow it at later ones."""

from __future__ import annotations

from collections.abc import Callable

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune.plan.execution import resolve_execution
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.data.datasets import Datasets, open_datasets
from spotune_trainer.engine.compile.layers import why_not
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan, library_versions, requested
from spotune_trainer.models.pretrained import load_config


def plan_run(
    job: FinetuneJob, directory: JobDirectory, checkpoint: Checkpoint | None, worker_memory_bytes: Callable[[], int]
) -> RunPlan:
    """The plan to run by: the one on the volume with the user's changes of `execution`, or a new one.

    Args:
        job: the job.
        directory: its folder; `plan.json` is written there.
        checkpoint: what the next worker group starts from. Before the first commit everything may still change.
        worker_memory_bytes: memory of one worker; asked where there is no plan yet.

    Raises:
        JobError: the model, the data or the execution cannot work, or what is trained changed after the first commit.
    """
    datasets = open_datasets(job, directory)
    value = files.read_json(directory.plan)
    meaning = fingerprint(job)
    if value is None or (checkpoint is None and value["fingerprint"] != meaning):
        plan = _resolve(job, datasets, meaning, worker_memory_bytes())
    else:
        plan = RunPlan.from_json(value)
        if plan.fingerprint != meaning:
            raise JobError(
                f"{directory.root} holds checkpoints of another model, data set or training (fingerprint "
                f"{plan.fingerprint[:8]}, this job has {meaning[:8]}): undo the change, or start in another directory"
            )
        plan.check_data(datasets.hashes())
        plan = plan.follow(job.spec.execution, checkpoint.name.step if checkpoint else 0)
    lacking = why_not(on_gpus=job.spec.workers.gpus > 0) if plan.compile else None
    if lacking:
        raise JobError(
            f"execution.compile: torch.compile needs {lacking} where the trainer runs: install it, or say false"
        )
    save_plan(directory, plan)
    return plan


def save_plan(directory: JobDirectory, plan: RunPlan) -> None:
    """Write `plan.json`."""
    files.write_json(directory.plan, plan.to_json())


def _resolve(job: FinetuneJob, datasets: Datasets, meaning: str, worker_memory_bytes: int) -> RunPlan:
    workers = job.spec.workers
    fewest = workers.min * max(workers.gpus, 1)
    asked = requested(job.spec.execution)
    if job.spec.execution.compile == "auto" and why_not(on_gpus=workers.gpus > 0):
        job = replace_fields(job, {"spec.execution.compile": False})
    execution = resolve_execution(load_config(job).to_dict(), job, fewest, worker_memory_bytes)
    return RunPlan(
        version=1,
        fingerprint=meaning,
        zero_stage=execution.zero_stage,
        micro_batch_size=execution.micro_batch_size,
        gradient_checkpointing=execution.gradient_checkpointing,
        compile=execution.compile,
        gathered_layers=execution.gathered_layers,
        whole_gradients=execution.whole_gradients,
        reason=execution.reason,
        data=datasets.hashes(),
        requested=asked,
        libraries=library_versions(),
    )
