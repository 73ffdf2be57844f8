"""Job files whose execution contradicts itself, or the rest of the job."""

from __future__ import annotations

from typing import Final

WORKERS: Final = "  workers: {count: 2, min: 1}\n"
_TRAINING: Final = "epochs: 3, globalBatchSize: 96"
_TO_TRAINING: Final = """seq2seq}
  dataset:
    train: {source: shards/train}
    eval: {fraction: 0.1, seed: 1}
  training: {"""
_NEEDED: Final = "microBatchSize: 8, reproducible: worldSize"


def _execution(fields: str, training: str = "") -> str:
    return f"{_TRAINING}{training}}}\n  execution: {{{fields}}}\n"


# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_EXECUTION = [
    (
        "no worker can be left out",
        "min: 1",
        "min: 2, onStraggler: replace",
        (
            ":10: spec.workers.onStraggler: replace needs a min below count: otherwise no worker can be left out; "
            "lower workers.min"
        ),
    ),
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
    (
        "bf16 for a model in float32",
        "seq2seq}\n",
        "seq2seq, dtype: float32}\n  execution: {precision: bf16}\n",
        ":6: spec.execution.precision: bf16 contradicts model.dtype float32: use auto, or bfloat16",
    ),
    (
        "FP8 for an encoder-decoder model",
        f"{_TRAINING}}}\n",
        _execution("precision: fp8"),
        ":10: spec.execution.precision: fp8 is for causal models; model.task is seq2seq: use auto",
    ),
    (
        "FP8 with a reference model in bfloat16",
        _TO_TRAINING,
        f"{_TO_TRAINING}objective: dpo, ".replace("seq2seq}", "causal}\n  execution: {precision: fp8-rowwise}"),
        ":6: spec.execution.precision: fp8-rowwise is for sft, orpo, simpo, not dpo: use auto",
    ),
    (
        "FP8 for a model in float16",
        "seq2seq}\n",
        "causal, dtype: float16}\n  execution: {precision: fp8}\n",
        ":5: spec.model.dtype: must be bfloat16 for execution.precision fp8, not float16",
    ),
    (
        "FP8 with weights in 4 bits",
        "seq2seq}\n",
        "causal}\n  execution: {precision: fp8}\n  adapter: {lora: {}, quantization: nf4}\n",
        ":7: spec.adapter.quantization: nf4 is not supported for execution.precision fp8: use none",
    ),
    (
        "FP8 with an adapter at stage 3",
        "seq2seq}\n",
        "causal}\n  adapter: {lora: {}}\n  execution: {precision: fp8, zeroStage: 3}\n",
        (
            ":7: spec.execution.precision: fp8 is compiled, and layers with frozen weights cannot be at ZeRO stage 3: "
            "use auto, or another zeroStage and offload"
        ),
    ),
    (
        "precision by another name",
        "seq2seq}\n",
        "causal}\n  execution: {precision: fp8-row}\n",
        (
            ':6: spec.execution.precision: expected auto, bf16, fp8 or fp8-rowwise, not "fp8-row"; did you mean '
            "fp8-rowwise?"
        ),
    ),
]

# The definition's rules cannot read a field that is a word or a truth value.
EAGER_FP8 = [
    (
        "FP8 that is not compiled",
        "seq2seq}\n",
        "causal}\n  execution: {precision: fp8, compile: false}\n",
        (
            ":6: spec.execution.compile: false makes fp8 slower than bf16, because scaling is not fused: use auto, or "
            "another precision"
        ),
    ),
]
