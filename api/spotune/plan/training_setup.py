"""The inputs of the memory plan: what is trained, the layout over the workers, and the memory of both together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spotune.plan.activations import Workload, keeps_attention_output
from spotune.plan.architecture import Architecture
from spotune.plan.memory import GPU_RUNTIME_BYTES, MemoryEstimate, Offload, Precision, ZeroStage, estimate_memory
from spotune.plan.parameters import TrainedParameters, trained_parameters

GPU_USABLE_FRACTION = 0.92
"""Fraction of a GPU's memory that the plan may use. The rest covers fragmentation and unmodelled allocations."""
CPU_USABLE_FRACTION = 0.7
"""Fraction of a machine's memory that CPU workers may use. Ray's object store and the page cache need the rest."""


@dataclass(frozen=True)
class TrainingSetup:
    """Everything about a training job that determines its memory, except the layout.

    Attributes:
        architecture: the model.
        precision: bytes per parameter of weights, gradients and optimizer states.
        global_batch_size: samples per optimizer step over all workers.
        sequence_length: longest sample in tokens; of the encoder, for encoder-decoder models.
        documents_per_row: documents that are packed into a sample, on average; attention stays within each.
        target_length: longest decoder sequence of encoder-decoder models in tokens, else 0.
        pretrained: whether pretrained weights are loaded (see `count_parameters`).
        lora_rank: rank of the adapters beside frozen weights; None: all parameters are trained.
        lora_dropout: whether adapters apply dropout to their input.
        quantised: whether the frozen weights are stored in 4 bits.
        offload: what is kept in host memory.
        fused_attention: whether attention kernels never write attention scores to memory.
        compiled: whether layers are compiled.
        fp8: how the matrix products of layers are computed from 8-bit floats; None: they are not.
        chunked_loss: whether the loss is computed from one chunk of logits at a time.
        runtime_bytes: memory of a worker process apart from its tensors.
        usable_fraction: fraction of the device's memory that the plan may use.
        on_cpu: whether the workers run on CPUs, so that device memory is host memory.
        commit_copies: number of host copies of a commit.
        host_memory_bytes: host memory of one GPU worker, as its pod requests it; None if it does not say.
    """

    architecture: Architecture
    precision: Precision
    global_batch_size: int
    sequence_length: int
    target_length: int = 0
    documents_per_row: float = 1.0
    pretrained: bool = True
    lora_rank: int | None = None
    lora_dropout: bool = False
    quantised: bool = False
    offload: Offload = "none"
    fused_attention: bool = True
    compiled: bool = False
    fp8: Literal["fp8", "fp8-rowwise"] | None = None
    chunked_loss: bool = False
    runtime_bytes: int = GPU_RUNTIME_BYTES
    usable_fraction: float = GPU_USABLE_FRACTION
    on_cpu: bool = False
    commit_copies: int = 1
    host_memory_bytes: int | None = None

    def budget_bytes(self, device_bytes: int) -> int:
        """The bytes that the plan may use on a device of `device_bytes`."""
        return int(device_bytes * self.usable_fraction)

    @property
    def trained(self) -> TrainedParameters:
        """The numbers of trained and frozen parameters."""
        return trained_parameters(
            self.architecture, pretrained=self.pretrained, lora_rank=self.lora_rank, quantised=self.quantised
        )

    def memory(self, world_size: int, layout: Layout) -> MemoryEstimate:
        """Estimated memory of one of `world_size` workers with `layout`."""
        workload = Workload(
            micro_batch_size=layout.micro_batch_size,
            sequence_length=self.sequence_length,
            target_length=self.target_length,
            bytes_per_element=self.precision.weight_bytes,
            gradient_checkpointing=layout.gradient_checkpointing,
            kept_layers=layout.kept_layers,
            saves_attention=keeps_attention_output(
                self.sequence_length,
                self.architecture.hidden_size,
                compiled=self.compiled,
                offload=layout.offload_activations,
            ),
            offload=layout.offload_activations,
            fused_attention=self.fused_attention,
            compiled=self.compiled,
            fp8=self.fp8 is not None,
            chunked_loss=self.chunked_loss,
            lora_rank=self.lora_rank,
            lora_dropout=self.lora_dropout,
        )
        return estimate_memory(
            self.architecture,
            workload,
            self.precision,
            layout.zero_stage,
            world_size,
            offload=self.offload,
            gathered_layers=layout.gathered_layers,
            whole_gradients=layout.whole_gradients,
            trained=self.trained,
            runtime_bytes=self.runtime_bytes,
            on_cpu=self.on_cpu,
            commit_copies=self.commit_copies,
        )


@dataclass(frozen=True)
class Layout:
    """How the work is distributed over the workers.

    Two fields are for stage 3 only. `gathered_layers`: number of layers whose weights are gathered once per
    step and then kept; the weights of all other layers are gathered before each use. `whole_gradients`: each worker
    accumulates unsharded gradients over the passes of a step and reduces them once; otherwise they are reduced after
    every pass, and each worker keeps its shard. The last two are for gradient checkpointing: `kept_layers` layers are
    not recomputed, and `offload_activations` moves what the others save to host memory.
    """

    zero_stage: ZeroStage
    micro_batch_size: int
    gradient_checkpointing: bool
    gathered_layers: int = 0
    whole_gradients: bool = False
    kept_layers: int = 0
    offload_activations: bool = False
