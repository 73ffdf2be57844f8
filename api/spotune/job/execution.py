"""How a job is executed and saved. Of all its fields, only `execution.precision` changes what is trained."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import model_validator

from spotune.custom_resource.base import NonNegativeInt, PositiveInt, Section, expecting, invalid
from spotune.job.model import AdapterSpec, ModelSpec
from spotune.units.durations import Duration

LOWEST_STAGE: Final[Mapping[str, int]] = {"none": 0, "optimizer": 1, "parameters": 3}
"""Minimum ZeRO stage that supports each value of `offload`."""


_REPRODUCIBLE: Final = "reproducible worldSize"

Precision = Literal["auto", "bf16", "fp8", "fp8-rowwise"]
FP8_PRECISIONS: Final = ("fp8", "fp8-rowwise")
"""Values of `precision` that change what is trained."""
FP8_OBJECTIVES: Final = ("sft", "orpo", "simpo")
"""Objectives of causal models without a reference model, whose log-probabilities would have another precision."""


class ExecutionSpec(Section):
    """How the work is distributed over the devices. It may change at any time and applies to the next worker group.

    Only FP8 of precision is frozen after the first checkpoint.
    """

    micro_batch_size: Annotated[Literal["auto"] | PositiveInt, expecting("auto or a whole number from 1")] = "auto"
    """Samples per forward and backward pass of one worker. auto: the memory plan chooses a size that fits."""
    zero_stage: Annotated[Literal["auto", 0, 1, 2, 3], expecting("auto, 0, 1, 2 or 3")] = "auto"
    """DeepSpeed ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights. auto: the lowest that fits."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What to keep in host memory: the optimizer states, or the weights and optimizer states."""
    gradient_checkpointing: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Recompute layers in the backward pass: less memory, up to a third more compute. true: all layers. auto: only if
    needed, and no more layers than needed."""
    offload_activations: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Move what recomputed layers save to host memory until the backward pass. true implies gradient checkpointing.
    auto: on GPUs, only if the model fits in no other way."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention implementation, with the names of transformers."""
    compile: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Compile layers and loss with torch.compile. auto: on GPUs if rows are packed, all weights are trained and the
    run is not too short for it to pay, or if precision is fp8 or fp8-rowwise."""
    precision: Precision = "auto"
    """Precision of the matrix products in the layers of a causal model. auto: model.dtype. bf16: the same, if that is
    bfloat16. fp8: 8-bit floats with one scale per matrix, on GPUs from compute capability 8.9 (L4, H100). fp8-rowwise:
    one scale per row, from 9.0 (H100). fp8 changes what is trained: it is frozen after the first checkpoint."""
    deterministic: bool = False
    """Use deterministic kernels only. The same number and model of GPUs then produces bitwise identical weights."""
    reproducible: Literal["none", "worldSize"] = "none"
    """worldSize: bitwise identical losses and weights at any number of workers of one kind, also if it changes. It
    implies deterministic, requires a microBatchSize, and takes 8 bytes of memory per trained parameter. none: no such
    promise."""
    flops_profile: NonNegativeInt = 0
    """Step before which one forward pass is profiled with DeepSpeed's FLOPS profiler, once per run. 0: never."""

    @property
    def has_deterministic_kernels(self) -> bool:
        """Whether only deterministic kernels are used."""
        return self.deterministic or self.reproducible == "worldSize"

    @property
    def is_fp8(self) -> bool:
        """Whether the matrix products of the layers are computed from 8-bit floats."""
        return self.precision in FP8_PRECISIONS

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        lowest = LOWEST_STAGE[self.offload]
        if self.zero_stage != "auto" and self.zero_stage < lowest:
            invalid(
                "zeroStage", f"{self.zero_stage} does not support offload {self.offload}: use auto or at least {lowest}"
            )
        return self

    @model_validator(mode="after")
    def _check_offload_activations(self) -> Self:
        if self.offload_activations is True and self.gradient_checkpointing is False:
            invalid("gradientCheckpointing", "false contradicts offloadActivations true: use auto or true")
        return self

    @model_validator(mode="after")
    def _check_reproducible(self) -> Self:
        if self.reproducible == "worldSize":
            if self.micro_batch_size == "auto":
                invalid("microBatchSize", f"auto depends on the workers, which {_REPRODUCIBLE} must not: set a number")
            if self.zero_stage == 3:
                invalid("zeroStage", f"3 is not supported for {_REPRODUCIBLE}: use auto or at most 2")
            if self.offload != "none":
                invalid("offload", f"{self.offload} is not supported for {_REPRODUCIBLE}: use none")
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        if self.flops_profile and self.attention == "flash_attention_2":
            invalid("flopsProfile", "cannot count flash_attention_2: set it to 0, or use attention sdpa or eager")
        return self


def check_precision(
    execution: ExecutionSpec, model: ModelSpec, adapter: AdapterSpec | None, objective: str, *, on_gpus: bool
) -> None:
    """Reject a precision that the rest of the job does not support."""
    precision = execution.precision
    if precision == "bf16" and model.dtype != "bfloat16":
        invalid("execution.precision", f"bf16 contradicts model.dtype {model.dtype}: use auto, or bfloat16")
    if not execution.is_fp8:
        return
    if model.task != "causal":
        invalid("execution.precision", f"{precision} is for causal models; model.task is {model.task}: use auto")
    if objective not in FP8_OBJECTIVES:
        invalid("execution.precision", f"{precision} is for {', '.join(FP8_OBJECTIVES)}, not {objective}: use auto")
    if model.dtype != "bfloat16":
        invalid("model.dtype", f"must be bfloat16 for execution.precision {precision}, not {model.dtype}")
    if execution.compile is False and on_gpus:
        reason = f"false makes {precision} slower than bf16, because scaling is not fused: use auto, or another"
        invalid("execution.compile", f"{reason} precision")
    if adapter is not None and adapter.quantization != "none":
        reason = f"{adapter.quantization} is not supported for execution.precision {precision}: use none"
        invalid("adapter.quantization", reason)
    if adapter is not None and (execution.zero_stage == 3 or execution.offload == "parameters"):
        reason = f"{precision} is compiled, and layers with frozen weights cannot be at ZeRO stage 3: use auto"
        invalid("execution.precision", f"{reason}, or another zeroStage and offload")


CheckpointEvery = Annotated[
    Literal["auto"] | PositiveInt | Duration,
    expecting("auto, a duration such as 300s, or a whole number of steps from 1"),
]


class CheckpointSpec(Section):
    """How often checkpoints are saved, how many are kept, and how many of them also in memory."""

    every: CheckpointEvery = "auto"
    """Checkpoint interval. auto: from the Young/Daly formula; or a duration such as 300s; or a number of steps."""
    keep: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    keep_every_steps: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this number. 0: none."""
    memory_copies: Annotated[Literal["auto", 0, 1, 2], expecting("auto, 0, 1 or 2")] = "auto"
    """Commits that each worker's node keeps in memory to resume from. auto: 2, or 1 where memory is short. 0: none."""
    peer_copy: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Copy each commit from the memory of its node to that of another node, to resume from after the loss of a node.
    auto: where memory suffices."""
    peer_copy_rate: PositiveInt = 200
    """Megabytes per second that a node sends at most while it copies a commit to another node."""

    @model_validator(mode="after")
    def _check_peer_copy(self) -> Self:
        if self.peer_copy is True and self.memory_copies == 0:
            invalid("peerCopy", "true copies what memoryCopies keeps in memory: set that to auto, 1 or 2")
        return self
