r"""Measures the speed of Hugging Face's Trainer on the models of `throughput.py`, on one GPU, also with Liger kernels.

Same model, random tokens, batch size and precision (bfloat16 with fp32 master weights: its `bf16=True`), with fused
AdamW. With --lora, an adapter of rank 16 for all linear layers by peft, on weights in bfloat16. Reports medians over
the steps after the warm-up; the device is synchronized around each timed step.

    PYTHONPATH=. python benchmarks/hf_trainer.py --size 1.1B --length 2048 --micro-batch 16 --batch 64 \
        --output benchmarks/results/hf_trainer.json
    PYTHONPATH=. python benchmarks/hf_trainer.py --size 32B --length 4096 --micro-batch 1 --batch 16 --steps 2 \
        --lora --gradient-checkpointing --liger-only --output benchmarks/results/hf_trainer_32B_lora.json
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from spotune_trainer.models.flops import ModelShape, mfu, peak_flops
from tests.trainer.support.measured import LLAMAS, machine, publish

WARM_UP_STEPS = 3


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """An endless dataset of random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._rows = torch.randint(3, vocabulary, (256, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index % len(self._rows)]
        return {"input_ids": row, "labels": row}


class Clock(TrainerCallback):
    """A callback that times the steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)


def measure(options: argparse.Namespace, *, liger: bool) -> dict[str, Any]:
    """Train; returns the speed."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    auto_model: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        dtype = torch.bfloat16 if options.lora else torch.float32
        model = auto_model.from_config(LlamaConfig(**LLAMAS[options.size]), dtype=dtype)
    shape, clock = ModelShape.from_model(model, frozen=options.lora), Clock()
    if options.lora:
        model.enable_input_require_grads()  # gradient checkpointing needs an input that has a gradient
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.batch // options.micro_batch,
            max_steps=WARM_UP_STEPS + options.steps,
            bf16=True,
            optim="adamw_torch_fused",
            use_liger_kernel=liger,
            gradient_checkpointing=options.gradient_checkpointing,
            dataloader_num_workers=2,
            save_strategy="no",
            report_to=[],
            logging_steps=1_000_000,
        )
        rows = RandomRows(options.length, LLAMAS[options.size]["vocab_size"])
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    seconds = statistics.median(clock.seconds[WARM_UP_STEPS:])
    used = mfu(
        shape.flops(options.batch, options.length), seconds, 1, peak_flops(torch.cuda.get_device_name(), "bfloat16")
    )
    return {
        "liger": liger,
        "stepSeconds": round(seconds, 5),
        "tokensPerSecond": round(options.batch * options.length / seconds),
        "mfu": used and round(used, 4),
        "peakAllocatedBytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    """Measure without and with Liger kernels, or only with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="size of the model")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows per forward pass")
    parser.add_argument("--batch", type=int, default=64, help="rows per step")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after the warm-up")
    parser.add_argument("--lora", action="store_true", help="train an adapter for weights in bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute layers again")
    parser.add_argument("--liger-only", action="store_true", help="measure with Liger kernels alone")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    asked = {name: value for name, value in vars(options).items() if name != "output"}
    kernels = (True,) if options.liger_only else (False, True)
    runs = [measure(options, liger=liger) for liger in kernels]
    publish({"machine": machine(), **asked, "runs": runs}, options.output)


if __name__ == "__main__":
    main()
