"""CEL rules of spec.execution.reproducible: what gives the same bits at any world size."""

from typing import Final

from spotune.crd.cel_rules import Rule
from spotune.job.training.hyperparameters import FIXED_POINT_EPSILON

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
