"""Models of a few thousand parameters, their tokenizer, and rows of a made-up task; nothing is downloaded."""

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
    """A byte-level BPE tokenizer with <pad>, </s> and <unk>, which ends every text with </s>, saved to a folder."""
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
    """A T5 or Llama configuration of a few thousand parameters, saved to a folder."""
    if task == "seq2seq":
        t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
        T5Config(**{"vocab_size": VOCABULARY, **t5, **values}).save_pretrained(directory)
    else:
        llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        ends = {"bos_token_id": 1, "eos_token_id": 1}
        LlamaConfig(**{"vocab_size": VOCABULARY, **llama, **ends, **values}).save_pretrained(directory)


def save_source(directory: Path, task: str, **values: Any) -> Path:
    """A folder to train from scratch from: configuration and tokenizer."""
    save_config(directory, task, **values)
    save_tokenizer(directory)
    return directory


def make_job(source: Path | str, task: str = "seq2seq", **sections: Mapping[str, Any]) -> FinetuneJob:
    """A job from scratch in float32; keyword arguments are sections of the spec in camelCase, merged over it."""
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
    """Rows of a list by sample id, as a `ShardedDataset` gives them."""

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
    """Questions of very uneven lengths with SQL answers, tokenised for a task."""
    rows = []
    for number in range(count):
        prompt = "how many singers are there ? " * (number % 4 + 1) + str(number)
        completion = f"SELECT count(*) FROM singer WHERE age > {number}"
        asked = tokenizer(prompt)["input_ids"][:-1]
        answered = tokenizer(completion)["input_ids"]
        row = {"completion": completion, "database": "concert"}
        if task == "seq2seq":
            tokens = {"input_ids": [*asked, 1], "labels": answered}
        else:
            tokens = {"input_ids": [*asked, *answered], "labels": [-100] * len(asked) + answered}
        rows.append(row | {name: np.array(ids, dtype=np.int32) for name, ids in tokens.items()})
    return rows
