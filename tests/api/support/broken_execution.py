"""Job files whose execution contradicts itself, or the rest of the job."""

from __future__ import annotations

from typing import Final

WORKERS: Final = "  workers: {count: 2, min: 1}\n"
_TRAINING: Final = "epochs: 3, globalBatchSize: 96"
_NEEDED: Final = "microBatchSize: 8, reproducible: worldSize"


def _execution(fields: str, training: str = "") -> str:
    return f"{_TRAINING}{training}}}\n  execution: {{{fields}}}\n"


# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_EXECUTION = [
    (
        "offload without ZeRO",
        WORKERS,
        "  execution: {offload: optimizer, zeroStage: 0}\n",
        ":10: spec.execution.zeroStage: 0 does not support offload optimizer: use auto or at least 1",
    ),
    (
        "offload of parameters that are not sharded",
        WORKERS,
        "  execution: {offload: parameters, zeroStage: 2}\n",
        ":10: spec.execution.zeroStage: 2 does not support offload parameters: use auto or at least 3",
    ),
    (
        "reproducible with a micro-batch that depends on the memory",
        f"{_TRAINING}}}\n",
        _execution("reproducible: worldSize"),
        (
            ":10: spec.execution.microBatchSize: auto depends on the workers, which reproducible worldSize must not: "
            "set a number"
        ),
    ),
    (
        "reproducible at stage 3",
        f"{_TRAINING}}}\n",
        _execution(f"{_NEEDED}, zeroStage: 3"),
        ":10: spec.execution.zeroStage: 3 is not supported for reproducible worldSize: use auto or at most 2",
    ),
    (
        "reproducible with offload",
        f"{_TRAINING}}}\n",
        _execution(f"{_NEEDED}, offload: optimizer"),
        ":10: spec.execution.offload: optimizer is not supported for reproducible worldSize: use none",
    ),
    (
        "reproducible with another optimizer",
        f"{_TRAINING}}}\n",
        _execution(_NEEDED, ", optimizer: muon"),
        ":9: spec.training.optimizer: muon is not supported for execution.reproducible worldSize: use adamw",
    ),
    (
        "reproducible with an epsilon that fixed point does not resolve",
        f"{_TRAINING}}}\n",
        _execution(_NEEDED, ", adamEpsilon: 1.0e-15"),
        (
            ":9: spec.training.adamEpsilon: must be at least 1e-08 for execution.reproducible worldSize, which rounds "
            "gradients"
        ),
    ),
    (
        "reproducible in float16",
        "seq2seq}\n",
        f"causal, dtype: float16}}\n  execution: {{{_NEEDED}}}\n",
        (
            ":5: spec.model.dtype: float16 is not supported for execution.reproducible worldSize: use bfloat16 or "
            "float32"
        ),
    ),
    (
        "reproducible by another name",
        f"{_TRAINING}}}\n",
        _execution("microBatchSize: 8, reproducible: world"),
        ':10: spec.execution.reproducible: expected none or worldSize, not "world"; did you mean worldSize?',
    ),
]
