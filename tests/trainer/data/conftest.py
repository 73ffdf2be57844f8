"""Fixtures: a small tokenizer, rows, and a writer of shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.format.mds import MDSWriter
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

WriteShards = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with 300 tokens that adds no special tokens."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["how many singers are there select count from singer"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture
def write_shards(tmp_path: Path) -> WriteShards:
    """A function that writes rows as MDS shards with hashes, `per_shard` samples each."""

    def write(
        rows: Sequence[dict[str, Any]],
        name: str = "shards",
        per_shard: int = 10,
        compression: str | None = None,
        columns: dict[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / name
        columns = columns or {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
        writer = MDSWriter(
            out=str(folder), columns=columns, hashes=["xxh3_64"], size_limit=None, compression=compression
        )
        for number, row in enumerate(rows, start=1):
            writer.write(row)
            if number % per_shard == 0:
                writer.flush_shard()
                writer._reset_cache()
        writer.finish()
        return folder

    return write


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """100 rows of different lengths; all tokens of row n are n."""
    generator = np.random.default_rng(7)
    return [
        {
            "input_ids": np.full(generator.integers(2, 9), number, dtype=np.int32),
            "labels": np.full(generator.integers(1, 5), number, dtype=np.int32),
        }
        for number in range(100)
    ]
