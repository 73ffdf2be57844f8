"""Models of a few thousand parameters, their tokenizer, and rows of a synthetic task. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Config

from spotune.job import FinetuneJob

VOCABULARY = 384
_TEXTS = ["how many singers are there ?", "SELECT count(*) FROM singer", "SELECT name FROM singer WHERE age > 30"]


def save_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Save a byte-level BPE tokenizer with <pad>, </s> and <unk>, which appends </s> to every text; returns it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(directory)
    return fast


def save_config(directory: Path, task: str, **values: Any) -> None:
    """Save a T5 or Llama configuration of a few thousand parameters."""
    if task == "seq2seq":
        t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
        T5Config(**{"vocab_size": VOCABULARY, **t5, **values}).save_pretrained(directory)
    else:
        llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        special_tokens = {"bos_token_id": 1, "eos_token_id": 1}
        LlamaConfig(**{"vocab_size": VOCABULARY, **llama, **special_tokens, **values}).save_pretrained(directory)


def save_source(directory: Path, task: str, **values: Any) -> Path:
    """Save configuration and tokenizer of a model that trains from scratch; returns the folder."""
    save_config(directory, task, **values)
    save_tokenizer(directory)
    return directory


def make_job(source: Path | str, task: str = "seq2seq", **sections: Mapping[str, Any]) -> FinetuneJob:
    """A float32 job with random weights. Keyword arguments are sections of the spec in camelCase, merged over it."""
    spec: dict[str, Any] = {
        "model": {"source": str(source), "task": task, "dtype": "float32", "initialise": "random"},
        "dataset": {"train": {"source": "/shards"}, "eval": {"source": "/held-out"}},
        "training": {"epochs": 1, "seed": 7},
    }
    for name, values in sections.items():
        spec[name] = {**spec.get(name, {}), **values}
    return FinetuneJob.model_validate(
        {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "tiny"}, "spec": spec}
    )


class ListedRows:
    """A list of rows with the interface of `ShardedDataset`; records which rows were read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self.read: list[int] = []

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample_id: int) -> Mapping[str, Any]:
        self.read.append(sample_id)
        return self.rows[sample_id]


def make_rows(tokenizer: PreTrainedTokenizerBase, task: str, count: int) -> list[dict[str, Any]]:
    """Questions of uneven lengths with SQL answers, tokenized for a task."""
    rows = []
    for number in range(count):
        prompt = "how many singers are there ? " * (number % 4 + 1) + str(number)
        completion = f"SELECT count(*) FROM singer WHERE age > {number}"
        prompt_ids = tokenizer(prompt)["input_ids"][:-1]
        completion_ids = tokenizer(completion)["input_ids"]
        row = {"completion": completion, "database": "concert"}
        if task == "seq2seq":
            tokens = {"input_ids": [*prompt_ids, 1], "labels": completion_ids}
        else:
            tokens = {"input_ids": [*prompt_ids, *completion_ids], "labels": [-100] * len(prompt_ids) + completion_ids}
        rows.append(row | {name: np.array(ids, dtype=np.int32) for name, ids in tokens.items()})
    return rows
