"""CEL rules of spec.execution.precision: what is computed from 8-bit floats, and that it stays so.

Rules cannot read `execution.compile`, which is a word or a truth value. The models refuse `false` for FP8.
"""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.execution import FP8_OBJECTIVES, FP8_PRECISIONS

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
