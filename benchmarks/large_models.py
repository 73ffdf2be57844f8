r"""Measures training of models on one GPU whose states do not fit in its memory, or only just.

Trains models with random weights on rows of random tokens, in the layout that the plan chooses: all weights of 14
billion parameters with the optimizer's states in host memory, adapters of 32 billion in bfloat16 and of 70 billion in
4 bits, and T5 of 3 and 11 billion. A model of 3.2 billion is trained three times: with its states on the device, in
host memory and updated by the device, and in host memory and updated by the processor, as DeepSpeed offloads them. No
commits are written: those of the largest would not fit on the machine. Results are written after each case, and add to
those that the output already has.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/large_models.py --output benchmarks/results/large_models.json
    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/large_models.py --toy   # on processors, to try it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.long_rows import LongCase, LongRowsWorker, long_case, previous_results, run
from benchmarks.throughput import Case
from spotune_trainer.models import lora
from spotune_trainer.models.quantization.nf4 import Linear4bit
from tests.trainer.support.measured import machine, publish, torchrun_group

_LORA: dict[str, Any] = {"adapter": {"lora": {"r": 16, "alpha": 32, "dropout": 0.0}}}
_QLORA: dict[str, Any] = {"adapter": {"lora": {"r": 16, "alpha": 32, "dropout": 0.0}, "quantization": "nf4"}}
_8BIT: dict[str, Any] = {"training": {"optimizer": "adamw8bit"}}
_ON_HOST: dict[str, Any] = {"execution": {"offload": "optimizer"}}
_8BIT_ON_HOST = {**_8BIT, **_ON_HOST}


def _t5(example: str, sections: dict[str, Any]) -> Case:
    """A job of examples/ on one GPU."""
    one_worker = {"workers": {"count": 1, "min": 1}}
    return Case(example, zero_stage=1, warm_up=2, steps=5, sections={**sections, **one_worker})


BY_PROCESSOR = ", states on the host, steps of the processor"

CASES = {
    "14B, all weights, states on the host": long_case("14B", 4096, 32, _8BIT_ON_HOST, 240),
    "32B, LoRA": long_case("32B", 4096, 16, _LORA, 200),
    "3.2B, states on the device": long_case("3.2B", 4096, 16, {}, 70, micro_batch=4),
    "3.2B, states on the host": long_case("3.2B", 4096, 16, _ON_HOST, 70, micro_batch=4),
    f"3.2B{BY_PROCESSOR}": long_case("3.2B", 4096, 16, _ON_HOST, 120, micro_batch=4),
    "70B, LoRA on 4 bits": long_case("70B", 4096, 4, _QLORA, 240, compile=False, warm_up=1, steps=2),
    "70B, LoRA on 4 bits, compiled": long_case("70B", 4096, 4, _QLORA, 240, warm_up=1, steps=2),
    "T5 of 11B, all weights, states on the host": LongCase(_t5("t5-11b-wikisql", _8BIT_ON_HOST), 150),
    "T5 of 3B, all weights": LongCase(_t5("t5-3b-wikisql", _8BIT), 80),
    "14B, all weights, 16 rows": long_case("14B", 4096, 16, _8BIT_ON_HOST, 220),
}
"""The most important first."""
TOYS = {
    "toy, states on the host": long_case("small", 256, 2, _8BIT_ON_HOST, 60, compile=False, warm_up=1, steps=1),
    f"toy{BY_PROCESSOR}": long_case("tiny", 256, 2, _ON_HOST, 60, compile=False, warm_up=1, steps=1),
    "toy, LoRA on 4 bits": long_case("small", 256, 2, _QLORA, 60, compile=True, warm_up=1, steps=1),
}


class LargeModelWorker(LongRowsWorker):
    """Reserves no host memory for commits."""

    def set_up(self) -> None:
        """Set up as any worker does."""
        super().set_up()
        self.checkpointing.reserve = lambda: None  # type: ignore[method-assign]


@contextmanager
def steps_of_the_processor() -> Iterator[None]:
    """Within it, the optimizer's states in host memory are DeepSpeed's, which the processor updates."""
    with ExitStack() as patches:
        for place in ("spotune.plan.memory", "spotune_trainer.engine.build"):
            patches.enter_context(mock.patch(f"{place}.can_stream", return_value=False))
        yield


@contextmanager
def quantized_as_built() -> Iterator[None]:
    """Within it, the layers of a Llama with random weights are quantized as they are made, one after the other."""
    create = LlamaDecoderLayer.__init__

    def create_quantized(layer: Any, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear:
                nn.init.normal_(module.weight, std=0.02)
                parent, _, attribute = name.rpartition(".")
                setattr(layer.get_submodule(parent), attribute, Linear4bit(module))

    with mock.patch.object(LlamaDecoderLayer, "__init__", create_quantized), mock.patch.object(lora, "quantize_layers"):
        yield


def main() -> None:
    """Measure cases as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; cases that it already has are measured again if named")
    parser.add_argument("--cases", nargs="*", default=None, help=f"names of cases: {'; '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=480, help="start no case that would take longer than this")
    parser.add_argument("--toy", action="store_true", help="tiny models, also on processors")
    options = parser.parse_args()
    started, found = time.monotonic(), previous_results(options.output)
    known = TOYS if options.toy else CASES
    with torchrun_group() as (_, world_size):
        if world_size != 1:
            raise SystemExit("large models are measured on one GPU: --nproc-per-node 1")
        found["machine"] = machine()
        for name in options.cases or [name for name in known if name not in found["cases"]]:
            if time.monotonic() - started + known[name].seconds > options.seconds:
                print(f"no time left for {name}", flush=True)
                continue
            with ExitStack() as patches:
                if name.endswith(BY_PROCESSOR):
                    patches.enter_context(steps_of_the_processor())
                if "4 bits" in name:
                    patches.enter_context(quantized_as_built())
                found["cases"][name] = run(name, known[name].case, LargeModelWorker)
            publish(found, options.output)
            torch.compiler.reset()


if __name__ == "__main__":
    main()
