"""CEL rules of spec.execution: what is computed from 8-bit floats, and what gives the same bits at any world size.

Rules cannot read `execution.compile`, which is a word or a truth value. The models refuse `false` for FP8.
"""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.execution import FP8_OBJECTIVES, FP8_PRECISIONS
from spotune.job.training.hyperparameters import FIXED_POINT_EPSILON

_FP8: Final = list(FP8_PRECISIONS)
_IS_NOT_FP8: Final = f"!(self.execution.precision in {_FP8})"

PRECISION_RULES: Final = (
    Rule(
        "self.execution.precision != 'bf16' || self.model.dtype == 'bfloat16'",
        "bf16 contradicts model.dtype: use auto, or bfloat16",
        "execution.precision",
    ),
    Rule(
        f"{_IS_NOT_FP8} || self.model.task == 'causal'",
        "FP8 is for causal models; model.task is seq2seq: use auto",
        "execution.precision",
    ),
    Rule(
        f"{_IS_NOT_FP8} || self.training.objective in {list(FP8_OBJECTIVES)}",
        f"FP8 is for {', '.join(FP8_OBJECTIVES)}, not for this training.objective: use auto",
        "execution.precision",
    ),
    Rule(
        f"{_IS_NOT_FP8} || self.model.dtype == 'bfloat16'",
        "must be bfloat16 for FP8 in execution.precision",
        "model.dtype",
    ),
    Rule(
        f"{_IS_NOT_FP8} || !has(self.adapter) || self.adapter.quantization == 'none'",
        "is not supported for FP8 in execution.precision: use none",
        "adapter.quantization",
    ),
    Rule(
        f"{_IS_NOT_FP8} || !has(self.adapter) || "
        "(self.execution.zeroStage != 3 && self.execution.offload != 'parameters')",
        "FP8 is compiled, and layers with frozen weights cannot be at ZeRO stage 3: use auto, or another zeroStage and "
        "offload",
        "execution.precision",
    ),
)
"""Rules that span sections of the spec."""

_NEW, _OLD = (
    f"({each}.spec.execution.precision in {_FP8} ? {each}.spec.execution.precision : '')"
    for each in ("self", "oldSelf")
)
SAME_PRECISION: Final = f"{_NEW} == {_OLD}"
"""CEL expression that is true if an update trains in the same precision: auto and bf16 are the same."""

REPRODUCIBLE_EXECUTION_RULES: Final = (
    Rule(
        "self.reproducible != 'worldSize' || type(self.microBatchSize) == int",
        "auto depends on the workers, which reproducible worldSize must not: set a number",
        "microBatchSize",
    ),
    Rule(
        "self.reproducible != 'worldSize' || type(self.zeroStage) != int || self.zeroStage <= 2",
        "3 is not supported for reproducible worldSize: use auto or at most 2",
        "zeroStage",
    ),
    Rule(
        "self.reproducible != 'worldSize' || self.offload == 'none'",
        "is not supported for reproducible worldSize: use none",
        "offload",
    ),
)
"""Rules within spec.execution."""

REPRODUCIBLE_RULES: Final = (
    Rule(
        "self.execution.reproducible != 'worldSize' || self.training.optimizer == 'adamw'",
        "must be adamw for execution.reproducible worldSize",
        "training.optimizer",
    ),
    Rule(
        f"self.execution.reproducible != 'worldSize' || self.training.adamEpsilon >= {FIXED_POINT_EPSILON!r}",
        f"must be at least {FIXED_POINT_EPSILON:g} for execution.reproducible worldSize, which rounds gradients",
        "training.adamEpsilon",
    ),
    Rule(
        "self.execution.reproducible != 'worldSize' || self.model.dtype != 'float16'",
        "float16 is not supported for execution.reproducible worldSize: use bfloat16 or float32",
        "model.dtype",
    ),
)
"""Rules that span sections of the spec."""
