"""What a gateway and one version of a model run, as plain values that travel to their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spotune_serve.deployment.hub import ModelSource
from spotune_serve.gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Placement:
    """Which nodes of a Ray cluster run the processes. The default is one machine, which runs all of them.

    Attributes:
        resources: custom Ray resources that a process takes of its node.
        max_per_node: maximum processes on one node; None: no limit.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    max_per_node: int | None = None


@dataclass(frozen=True)
class GatewayConfig:
    """A gateway.

    Attributes:
        name: model id in the API.
        settings: keys, limits and timeouts.
        api_keys_file: file with the API keys, one per line, which each gateway reads, and reads again when it has
            changed; None: the keys of `settings`.
        host: address that it listens on.
        port: TCP port that it listens on.
        keep_alive_seconds: time after which it closes a connection without a request: longer than the 60 s of ingress
            controllers, because the side that reuses connections must be the first to close them.
        linger_seconds: part of `drain_seconds` in which a leaving gateway still takes connections: load balancers need
            time to notice.
        drain_seconds: time that a leaving gateway has to finish its requests.
        scales_to_zero: whether it is no fault that a version has no replica.
        placement: nodes for gateways.
        processes: gateway processes of one machine, which share the port. On a cluster, each gateway has a port of its
            own, and an option of the deployment is their number.
        counts_folder: where processes that share a port write what they count, so that each can report the sums; None:
            each gateway reports what it counts itself.
    """

    name: str
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    api_keys_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keep_alive_seconds: int = 90
    linger_seconds: float = 0.0
    drain_seconds: float = 30.0
    scales_to_zero: bool = False
    placement: Placement = field(default_factory=Placement)
    processes: int = 1
    counts_folder: Path | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One version of a model and how its replicas run.

    Attributes:
        directory: export directory, job directory with an export, or any transformers model with safetensors; or a
            model on the Hugging Face Hub or in a bucket, which each process downloads.
        adapters: directories of LoRA adapters, by model id.
        replicas: number of replicas. On a cluster, an option of the deployment replaces it.
        step: step of the export to load, if the folder is that of a FinetuneJob; None: whatever is there.
        gpus: GPUs per replica; a fraction shares a GPU.
        threads: PyTorch threads per replica; 0: one per processor of its container.
        engine: auto: vllm for causal models on a GPU where vLLM is installed, transformers for all others.
        batch_invariant: with vllm, use kernels whose results do not depend on the batch.
        max_batch_size: maximum sequences that a replica decodes at once; None: the engine's default.
        drain_seconds: time that a leaving replica has to finish its sequences.
        placement: nodes for replicas.
    """

    directory: ModelSource
    adapters: Mapping[str, Path] = field(default_factory=dict)
    replicas: int = 1
    step: int | None = None
    gpus: float = 0.0
    threads: int = 0
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    batch_invariant: bool = False
    max_batch_size: int | None = None
    drain_seconds: float = 30.0
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True)
class VersionConfig:
    """One version in a gateway's list.

    Attributes:
        application: the Ray Serve application with its replicas.
        directory: the model, as in `ModelConfig`. The gateway reads its tokenizer and prompt.
        adapters: directories of LoRA adapters, by model id.
        version: its name.
        weight: its part of the requests, relative to the weights of the others.
        step: as in `ModelConfig`.
    """

    application: str
    directory: ModelSource
    adapters: Mapping[str, Path]
    version: str
    weight: float
    step: int | None = None
