"""How it is executed and saved: nothing here changes what is trained."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import model_validator

from spotune.job.base import NotNegative, Positive, Section, expecting, invalid
from spotune.units.durations import Duration

LOWEST_STAGE: Final[Mapping[str, int]] = {"none": 0, "optimizer": 1, "parameters": 3}
"""The lowest ZeRO stage that can keep something in host memory, by `offload`."""


class ExecutionSpec(Section):
    """How the work is laid out on the devices; it may change at any time and applies at the next worker group."""

    micro_batch_size: Annotated[Literal["auto"] | Positive, expecting("auto or a whole number from 1")] = "auto"
    """Samples per forward and backward pass of one worker; auto: what fits, from the memory plan."""
    zero_stage: Annotated[Literal["auto", 0, 1, 2, 3], expecting("auto, 0, 1, 2 or 3")] = "auto"
    """DeepSpeed ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too; auto: the lowest that fits."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep in host memory: the optimizer states, or weights and optimizer states."""
    gradient_checkpointing: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute; auto: only if needed."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention implementation, by the names of transformers."""
    compile: Annotated[Literal["auto"] | bool, expecting("auto, true or false")] = "auto"
    """Compile layers and loss with torch.compile; auto: on GPUs, where rows are packed and all weights are trained."""
    deterministic: bool = False
    """Take only kernels that come to the same bits every time: the same weights again on as many of the same GPUs."""
    flops_profile: NotNegative = 0
    """Before this step, profile a forward pass with DeepSpeed's flops profiler, once in the run; 0: never."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        lowest = LOWEST_STAGE[self.offload]
        if self.zero_stage != "auto" and self.zero_stage < lowest:
            invalid("zeroStage", f"{self.zero_stage} cannot offload: use auto, or {lowest} at least")
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        if self.flops_profile and self.attention == "flash_attention_2":
            invalid("flopsProfile", "counts nothing of flash_attention_2: leave it out, or use attention sdpa or eager")
        return self


CheckpointEvery = Annotated[
    Literal["auto"] | Positive | Duration, expecting("auto, a duration such as 300s, or a whole number of steps from 1")
]


class CheckpointSpec(Section):
    """How often the training state is committed, and how many commits are kept."""

    every: CheckpointEvery = "auto"
    """auto: by the Young/Daly interval; a duration such as 300s; or a number of steps."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: NotNegative = 0
    """Also keep every checkpoint at a multiple of so many steps; 0: none."""
