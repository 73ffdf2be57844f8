r"""Measures the speed of torchtitan's own trainer on the models of `throughput.py`, on one GPU, with its FP8 recipes.

Same shapes, random tokens, batch and optimizer (fused AdamW on float32 states). torchtitan compiles each layer and the
loss, as its documentation recommends with FP8. "fp8" is its tensorwise recipe for all linear layers but the output,
"fp8-rowwise" the rowwise one. On one GPU it trains under autocast from float32 weights. With --weights bfloat16,
weights and moments are in bfloat16, which is less precise than what spotune trains. Needs torchtitan 0.2.2, torchdata,
tyro and datasets.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/torchtitan_fp8.py --size 1.1B --length 2048 --micro-batch 16 \
        --batch 64 --output benchmarks/results/torchtitan_fp8.json
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machine import describe_machine
from spotune_trainer.models.flops import ModelShape, mfu, peak_flops
from tests.trainer.support.measured import LLAMAS, publish

WARM_UP_STEPS = 3
RECIPES = {"bf16": None, "fp8": "tensorwise", "fp8-rowwise": "rowwise"}


class RandomRows:
    """An endless loader of random tokens, for torchtitan's `BaseDataLoader` protocol."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(3, vocabulary, (rows, length + 1), generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": self._rows[:, :-1].contiguous()}, self._rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """It has no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """It has no state."""


def model_arguments(size: str) -> llama3.TransformerModelArgs:
    """Torchtitan's arguments for one of `LLAMAS`, whose feed-forward layers it describes by a multiplier."""
    shape = LLAMAS[size]
    return llama3.TransformerModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape.get("num_key_value_heads"),
        vocab_size=shape["vocab_size"],
        # It rounds 8/3 of the width up to a multiple: of the wanted width, if that is larger.
        multiple_of=shape["intermediate_size"],
    )


def register(options: argparse.Namespace) -> None:
    """Make the model known to torchtitan as "measured", with rows of random tokens."""
    vocabulary = LLAMAS[options.size]["vocab_size"]
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={options.size: model_arguments(options.size)},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: RandomRows(options.micro_batch, options.length, vocabulary),
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec("measured", spec)


def job_config(options: argparse.Namespace, precision: str, folder: str) -> JobConfig:
    """What torchtitan's command line would make of the options of a case."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "measured", options.size
    config.training.local_batch_size, config.training.global_batch_size = options.micro_batch, options.batch
    config.training.seq_len, config.training.steps = options.length, WARM_UP_STEPS + options.steps
    config.training.dtype = options.weights
    config.activation_checkpoint.mode = options.recompute
    config.compile.enable = torch.cuda.is_available()
    config.metrics.log_freq = 1_000
    config.lr_scheduler.warmup_steps = 1
    if recipe := RECIPES[precision]:
        config.model.converters = ["quantize.linear.float8"]
        float8 = config.quantize.linear.float8
        float8.filter_fqns = ["output"]
        float8.emulate = not torch.cuda.is_available()
        float8.recipe_name = None if recipe == "tensorwise" else recipe  # None: tensorwise
    return config


def measure(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Train; returns the speed."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(job_config(options, precision, folder))
        rows = trainer.batch_generator(trainer.dataloader)
        seconds = []
        for step in range(1, WARM_UP_STEPS + options.steps + 1):
            synchronize()
            started = time.perf_counter()
            trainer.step = step
            trainer.train_step(rows)
            synchronize()
            seconds.append(time.perf_counter() - started)
        trainer.close()
        torch.distributed.destroy_process_group()
    model = trainer.model_parts[0]
    widths = {module.weight.shape[0] for name, module in model.named_modules() if name.endswith("feed_forward.w1")}
    assert widths == {LLAMAS[options.size]["intermediate_size"]}, f"torchtitan made feed-forward layers of {widths}"
    found = {
        "precision": precision,
        "weights": options.weights,
        "recompute": options.recompute,
        "microBatch": options.micro_batch,
        "batch": options.batch,
        "parameters": sum(each.numel() for each in model.parameters()),
        "convertedLayers": sum(type(each).__name__ == "Float8Linear" for each in model.modules()),
        **speed(options, statistics.median(seconds[WARM_UP_STEPS:])),
        "stepSecondsSpread": [round(each(seconds[WARM_UP_STEPS:]), 5) for each in (min, max)],
    }
    del trainer, rows, model
    return found


def speed(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Tokens per second, and the part of the peak of bfloat16, as `throughput.py` counts it."""
    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        shape = ModelShape.from_model(auto_model.from_config(LlamaConfig(**LLAMAS[options.size])))
    found = {"stepSeconds": round(seconds, 5), "tokensPerSecond": round(options.batch * options.length / seconds)}
    if torch.cuda.is_available():
        peak = peak_flops(torch.cuda.get_device_name(), "bfloat16")
        used = mfu(shape.flops(options.batch, options.length), seconds, 1, peak)
        found |= {"mfu": used and round(used, 4), "peakAllocatedBytes": torch.cuda.max_memory_allocated()}
    return found


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Measure each precision, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=sorted(LLAMAS), default="1.1B")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows at once")
    parser.add_argument("--batch", type=int, default=64, help="rows per step")
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32", help="type of the states")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--precision", choices=sorted(RECIPES), nargs="+", default=list(RECIPES))
    parser.add_argument("--output", type=Path, help="file of the results")
    options = parser.parse_args()
    register(options)
    cases = []
    for precision in options.precision:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        cases.append(measure(options, precision))
        gc.collect()
        found = {"machine": describe_machine(), "torchtitan": version("torchtitan"), "size": options.size}
        publish({**found, "length": options.length, "cases": cases}, options.output)


if __name__ == "__main__":
    main()
