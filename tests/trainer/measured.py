"""What measurements of the trainer on GPUs share: ranks that torchrun starts, sizes of models, the machine's name.

Without a GPU the ranks train on the CPU, which is for trying a benchmark at its smallest size.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming.base.format.mds import MDSWriter
from torch import distributed

from spotune.job import FinetuneJob
from spotune_trainer.worker import Worker
from tests.trainer.layouts import BACKENDS
from tests.trainer.tiny import VOCABULARY, make_job, save_source

LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    },
    "1.1B": {  # TinyLlama's shape
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "3.2B": {  # Llama 3.2's shape, with untied embeddings of a smaller vocabulary
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "8B": {  # Llama 3.1's shape
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Configurations by size."""
_SAMPLES = 256


def make_llama_job(
    folder: Path, size: str, batch: int, length: int, sections: Mapping[str, Any] | None = None, **checkpoint: int
) -> FinetuneJob:
    """A job over rows of random tokens that nobody will finish, with all that it needs in a folder.

    Args:
        folder: gets model and shards.
        size: one of `LLAMAS`, from random weights.
        batch: rows of a step.
        length: tokens of a row.
        sections: other sections of the job, merged over it.
        checkpoint: that section of the job.
    """
    save_source(folder / "source", "causal", **LLAMAS[size])
    random = np.random.default_rng(0)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
        for _ in range(_SAMPLES):
            row = random.integers(3, VOCABULARY, length, dtype=np.int32)
            writer.write({"input_ids": row, "labels": row})
    sections = {name: dict(values) for name, values in (sections or {}).items()}
    return make_job(
        folder / "source",
        "causal",
        model={"dtype": "bfloat16", **sections.pop("model", {})},
        dataset={"train": {"source": str(folder / "shards")}, "eval": None, "maxLength": length},
        training={"epochs": 1_000_000, "globalBatchSize": batch, **sections.pop("training", {})},
        checkpoint=checkpoint,
        **sections,
    )


class QuicklyBuiltWorker(Worker):
    """Draws its weights on the GPU, where there is one: what they are does not matter, and it takes minutes else."""

    def set_up(self) -> None:
        with torch.device("cuda") if torch.cuda.is_available() else nullcontext():
            super().set_up()


@contextmanager
def torchrun_group() -> Iterator[tuple[int, int]]:
    """Join the group of the ranks that torchrun has started, each on its GPU; gives rank and world size."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(BACKENDS)
    yield distributed.get_rank(), distributed.get_world_size()
    if distributed.is_initialized():  # the ranks may have left it for groups of their own
        distributed.destroy_process_group()


def from_first_rank(value: Any) -> Any:
    """What rank 0 has, on every rank of the group."""
    shared = [value]
    distributed.broadcast_object_list(shared)
    return shared[0]


def machine() -> dict[str, Any]:
    """What a figure was measured on: device, world size, versions."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "worldSize": int(os.environ["LOCAL_WORLD_SIZE"]),
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }


def publish(result: dict[str, Any], output: Path | None) -> None:
    """Print what was found, and write it to a file."""
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if output:
        output.write_text(text + "\n", encoding="utf-8")
