"""What one service runs, as plain values that travel to its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spotune_serve.deployment.hub import HubModel
from spotune_serve.gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Scaling:
    """How many replicas run.

    Attributes:
        min_replicas: minimum number of replicas; 0: the service scales to zero.
        max_replicas: maximum number of replicas.
        target_ongoing_requests: sequences per replica that autoscaling aims at; used if the two numbers differ.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 8.0

    @property
    def autoscales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas > self.min_replicas

    @property
    def scales_to_zero(self) -> bool:
        """Whether the service may have no replica."""
        return self.min_replicas == 0


@dataclass(frozen=True)
class Placement:
    """Which nodes of a Ray cluster run the processes. The default is one machine, which runs all of them.

    Attributes:
        gateways: number of gateway processes.
        gateway_resources: custom Ray resources that a gateway takes of its node.
        replica_resources: custom Ray resources that a replica takes of its node.
        max_per_node: maximum gateways, and maximum replicas, on one node; None: no limit.
    """

    gateways: int = 1
    gateway_resources: Mapping[str, float] = field(default_factory=dict)
    replica_resources: Mapping[str, float] = field(default_factory=dict)
    max_per_node: int | None = None


@dataclass(frozen=True)
class ServiceConfig:
    """One model and how it is served.

    Attributes:
        directory: export directory, job directory with an export, or any transformers model with safetensors; or a
            model on the Hugging Face Hub, which each process downloads.
        name: model id in the API; empty: the job's name, or the directory's.
        adapters: directories of LoRA adapters, by model id.
        scaling: number of replicas.
        placement: nodes for the processes.
        gpus: GPUs per replica; a fraction shares a GPU.
        threads: PyTorch threads per replica; 0: one per processor of its container.
        engine: auto: vllm for causal models on a GPU where vLLM is installed, transformers for all others.
        max_batch_size: maximum sequences that a replica decodes at once; None: the engine's default.
        drain_seconds: time that a leaving replica has to finish its sequences.
        gateway: keys, limits and timeouts.
        api_keys_file: file with the API keys, one per line, read by each gateway when it starts; None: those of
            `gateway`.
    """

    directory: Path | HubModel
    name: str = ""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    scaling: Scaling = Scaling()
    placement: Placement = field(default_factory=Placement)
    gpus: float = 0.0
    threads: int = 0
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    max_batch_size: int | None = None
    drain_seconds: float = 30.0
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    api_keys_file: Path | None = None
