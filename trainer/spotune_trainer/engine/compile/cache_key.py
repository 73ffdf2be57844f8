"""What compiled code depends on: device, versions, the model's architecture, shapes, and how it is trained."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotune_trainer import files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from spotune.job import FinetuneJob
    from spotune_trainer.job_directory.run_plan import RunPlan

_FORMAT = 1
_PACKAGES = ("spotune", "torch", "triton", "deepspeed", "transformers", "torchao")
_ORIGINS = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
"""Values of a configuration that say where the model is from."""


def compile_key(job: FinetuneJob, plan: RunPlan, config: PretrainedConfig) -> dict[str, Any]:
    """The key of a job's compiled code, as JSON values.

    Two starts with equal keys compile the same code, wherever their weights and data are from. A value too much makes
    a start compile once more. One that is missing costs only the size of the file, since the compiler checks for itself
    whether an entry fits.
    """
    spec = job.spec
    architecture = {name: value for name, value in config.to_dict().items() if name not in _ORIGINS}
    key = {
        "format": _FORMAT,
        "device": device(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "model": {**architecture, "class": type(config).__name__},
        "shapes": [
            plan.micro_batch_size,
            spec.dataset.max_length,
            spec.dataset.max_completion_length,
            spec.dataset.packing,
        ],
        "plan": [plan.zero_stage, plan.gradient_checkpointing],
        "dtype": spec.model.dtype,
        "execution": [
            spec.execution.precision,
            spec.execution.attention,
            spec.execution.offload,
            spec.execution.has_deterministic_kernels,
            spec.execution.reproducible,
        ],
        "adapter": spec.adapter.model_dump(mode="json") if spec.adapter is not None else None,
        "training": [spec.training.objective, spec.training.optimizer, spec.training.label_smoothing],
    }
    value: dict[str, Any] = json.loads(json.dumps(key, default=str, sort_keys=True))
    return value


def device() -> str:
    """The kind of GPU of this process, or of processor with its threads: code for one may not fit another."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} {major}.{minor}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return f"cpu {files.content_key(described)[:8]} {torch.get_num_threads()}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
