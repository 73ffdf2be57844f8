"""Shared by measurements of the trainer on GPUs: ranks that torchrun starts, model sizes, the machine's description.

Without a GPU the ranks train on the CPU, to try a benchmark at its smallest size.
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
from transformers import CONFIG_MAPPING

from spotune.job import FinetuneJob
from spotune.job_file.load import load_job
from spotune_trainer.training.worker import Worker
from tests.examples.jobs import JOB_FILES, config_of
from tests.provenance import commit
from tests.trainer.support.layouts import BACKENDS
from tests.trainer.support.tiny import VOCABULARY, make_job, save_source, save_tokenizer

LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    },
    "small": {  # heads as large as real ones
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
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
LLAMAS |= {
    "14B": {  # Qwen 2.5's shapes
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "70B": {  # Llama 3.1's shape
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
LLAMAS["8Bx8"] = LLAMAS["8B"] | {"num_hidden_layers": 8}  # a quarter of its layers
"""Configurations by size."""
_SAMPLES = 256
_SHORTER = 8
"""Rows are shorter than the maximum by a random number of tokens below this."""
_KEPT = ("adapter", "execution", "workers")
"""Parts of an example that are measured; its data, evaluation, trackers and checkpoints are not."""


def make_llama_job(
    folder: Path,
    size: str,
    batch: int,
    length: int,
    sections: Mapping[str, Any] | None = None,
    documents: int = 1,
    **checkpoint: int,
) -> FinetuneJob:
    """A job over rows of random tokens, too long to finish; writes its model and shards to a folder.

    Args:
        folder: gets model and shards.
        size: one of `LLAMAS`, from random weights.
        batch: rows of a step.
        length: tokens of a row.
        sections: other sections of the job, merged over it.
        documents: packed in each row, of random lengths.
        checkpoint: that section of the job.
    """
    save_source(folder / "source", "causal", **LLAMAS[size])
    random = np.random.default_rng(0)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    if documents > 1:
        columns["lengths"] = "ndarray:int32"
    with MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
        for _ in range(_SAMPLES):
            row = random.integers(3, VOCABULARY, length, dtype=np.int32)
            boundaries = np.sort(random.choice(np.arange(1, length), documents - 1, replace=False))
            lengths = np.diff(np.concatenate([[0], boundaries, [length]])).astype(np.int32)
            writer.write({"input_ids": row, "labels": row} | ({"lengths": lengths} if documents > 1 else {}))
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


def example_job(name: str) -> tuple[FinetuneJob, dict[str, Any]]:
    """A job of examples/ by its name, and the `config.json` of its model."""
    (file,) = (file for file in JOB_FILES if file.stem == name)
    job = load_job(file)
    return job, config_of(job, file.parent)


def make_example_job(
    folder: Path, name: str, batch: int | None = None, sections: Mapping[str, Any] | None = None
) -> FinetuneJob:
    """A job of examples/ with random weights and rows of random tokens up to its maximum length, too long to finish.

    Unless rows are packed, some are a few tokens shorter, so that batches have padding as real ones do.

    Args:
        folder: gets model and shards.
        name: of the job.
        batch: rows of a step instead of the example's.
        sections: parts of the job, merged over it.
    """
    job, config = example_job(name)
    make_config: Any = CONFIG_MAPPING[config.pop("model_type")]
    make_config(**config).save_pretrained(folder / "source")
    save_tokenizer(folder / "source")
    dataset, training = job.spec.dataset, job.spec.training
    lengths = {"input_ids": dataset.max_length}
    lengths["labels"] = dataset.max_completion_length if job.spec.model.task == "seq2seq" else dataset.max_length
    random = np.random.default_rng(0)
    with MDSWriter(out=str(folder / "shards"), columns=dict.fromkeys(lengths, "ndarray:int32")) as writer:
        for _ in range(_SAMPLES):
            shorter = 0 if dataset.packing else random.integers(_SHORTER)
            writer.write(
                {part: random.integers(3, VOCABULARY, n - shorter, dtype=np.int32) for part, n in lengths.items()}
            )
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kept: dict[str, Any] = {part: values for part, values in spec.items() if part in _KEPT}
    sections = kept | {part: {**kept.get(part, {}), **values} for part, values in (sections or {}).items()}
    optimizer = {"optimizer": training.optimizer, "globalBatchSize": batch or training.global_batch_size}
    return make_job(
        folder / "source",
        job.spec.model.task,
        model={"dtype": job.spec.model.dtype, **sections.pop("model", {})},
        dataset={
            "train": {"source": str(folder / "shards")},
            "eval": None,
            "packing": dataset.packing,
            "maxLength": dataset.max_length,
            "maxCompletionLength": dataset.max_completion_length,
        },
        training={"epochs": 1_000_000, **optimizer, **sections.pop("training", {})},
        checkpoint={"every": 1_000_000},
        **sections,
    )


class QuicklyBuiltWorker(Worker):
    """Initializes random weights on the GPU if there is one: on the CPU it takes minutes. The values do not matter.

    Offloaded parameters have to be initialized on the host.
    """

    def set_up(self) -> None:
        on_gpu = torch.cuda.is_available() and self.job.spec.execution.offload != "parameters"
        with torch.device("cuda") if on_gpu else nullcontext():
            super().set_up()


@contextmanager
def torchrun_group() -> Iterator[tuple[int, int]]:
    """Join the group of the ranks that torchrun has started, each on its GPU. Yields rank and world size."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(BACKENDS)
    yield distributed.get_rank(), distributed.get_world_size()
    if distributed.is_initialized():  # the ranks may have replaced it by groups of their own
        distributed.destroy_process_group()


def from_first_rank(value: Any) -> Any:
    """Broadcast a value of rank 0 to every rank of the group."""
    shared = [value]
    distributed.broadcast_object_list(shared)
    return shared[0]


def machine() -> dict[str, Any]:
    """Commit and machine of a measurement: device, world size, versions."""
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "worldSize": int(os.environ["LOCAL_WORLD_SIZE"]),
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }


def publish(result: dict[str, Any], output: Path | None) -> None:
    """Print a result, and write it to a file if one is given."""
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if output:
        output.write_text(text + "\n", encoding="utf-8")
