"""What one service runs, as plain values that travel to its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spotune_serve.gateway.settings import GatewaySettings


@dataclass(frozen=True)
class ServiceConfig:
    """One model and how it is served.

    Attributes:
        directory: export directory, or any transformers model with safetensors.
        name: model id in the API; empty: the job's name, or the directory's.
        adapters: directories of LoRA adapters, by model id.
        replicas: number of replicas.
        gpus: GPUs per replica; a fraction shares a GPU.
        threads: PyTorch threads per replica; 0 keeps PyTorch's default.
        max_batch_size: maximum sequences that a replica decodes at once.
        drain_seconds: time that a leaving replica has to finish its sequences.
        gateway: keys, limits and timeouts.
    """

    directory: Path
    name: str = ""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    replicas: int = 1
    gpus: float = 0.0
    threads: int = 0
    max_batch_size: int = 32
    drain_seconds: float = 30.0
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
