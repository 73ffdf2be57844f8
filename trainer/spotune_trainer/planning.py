"""Resolve a job's plan at its first start, and follow it at later ones."""

from __future__ import annotations

import ray

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.plan.devices import machine_memory_bytes
from spotune.plan.execution import resolve_execution
from spotune_trainer import files
from spotune_trainer.capacity import live_slots
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.datasets import Datasets, open_datasets
from spotune_trainer.layout import JobDirectory
from spotune_trainer.models import load_config
from spotune_trainer.run_plan import RunPlan, library_versions, requested


def plan_run(job: FinetuneJob, directory: JobDirectory, checkpoint: Checkpoint | None) -> RunPlan:
    """The plan to run by: the one on the volume with the user's changes of `execution`, or a new one.

    Args:
        job: the job.
        directory: its folder; `plan.json` is written there.
        checkpoint: what the next worker group starts from. Before the first commit everything may still change.

    Raises:
        JobError: the model, the data or the execution cannot work, or what is trained changed after the first commit.
    """
    datasets = open_datasets(job, directory)
    value = files.read_json(directory.plan)
    meaning = fingerprint(job)
    if value is None or (checkpoint is None and value["fingerprint"] != meaning):
        plan = _resolve(job, datasets, meaning)
    else:
        plan = RunPlan.from_json(value)
        if plan.fingerprint != meaning:
            raise JobError(
                f"{directory.root} holds checkpoints of another model, data set or training (fingerprint "
                f"{plan.fingerprint[:8]}, this job has {meaning[:8]}): undo the change, or start in another directory"
            )
        plan.check_data(datasets.hashes())
        plan = plan.follow(job.spec.execution, checkpoint.name.step if checkpoint else 0)
    save_plan(directory, plan)
    return plan


def save_plan(directory: JobDirectory, plan: RunPlan) -> None:
    """Write `plan.json`."""
    files.write_json(directory.plan, plan.to_json())


def _resolve(job: FinetuneJob, datasets: Datasets, meaning: str) -> RunPlan:
    workers = job.spec.workers
    fewest = workers.min * max(workers.gpus, 1)
    execution = resolve_execution(load_config(job).to_dict(), job, fewest, _worker_memory_bytes(job))
    return RunPlan(
        version=1,
        fingerprint=meaning,
        zero_stage=execution.zero_stage,
        micro_batch_size=execution.micro_batch_size,
        gradient_checkpointing=execution.gradient_checkpointing,
        reason=execution.reason,
        data=datasets.hashes(),
        requested=requested(job.spec.execution),
        libraries=library_versions(),
    )


def _worker_memory_bytes(job: FinetuneJob) -> int:
    """Memory of one worker: its GPU's, or an even share of a CPU node's, asked of a node that has one."""
    workers = job.spec.workers
    if workers.gpus > 0:
        return int(ray.get(ray.remote(num_gpus=1)(_gpu_memory_bytes).remote()))
    nodes = ray.nodes() if ray.is_initialized() else []
    with_slots = [node["NodeID"] for node in nodes if live_slots([node], "CPU")]
    if not nodes or with_slots == [ray.get_runtime_context().get_node_id()]:
        return machine_memory_bytes() // workers.count
    memory, slots = ray.get(ray.remote(num_cpus=1)(_node_memory_bytes).remote())
    return int(memory // min(slots, workers.count))


def _node_memory_bytes() -> tuple[int, int]:
    """Memory of the node this runs on, and the workers it has room for."""
    here = ray.get_runtime_context().get_node_id()
    (slots,) = (live_slots([node], "CPU") for node in ray.nodes() if node["NodeID"] == here)
    return machine_memory_bytes(), slots


def _gpu_memory_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
