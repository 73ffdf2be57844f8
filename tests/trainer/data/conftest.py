"""Fixtures: a small tokenizer, rows, a writer of shards, and object stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from streaming.base.format.mds import MDSWriter
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune_trainer.data.stores import find
from tests.trainer.support.buckets import Bucket, open_bucket

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


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an object store on this machine with the bucket "bucket", found by environment variables."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=environment["S3_ENDPOINT_URL"])
        client.create_bucket(Bucket="bucket")
        find.open_store.cache_clear()
        yield client
    find.open_store.cache_clear()
    server.stop()


@pytest.fixture(scope="module")
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket, found by environment variables: of S3, or of the kind that the test is parametrized with."""
    with open_bucket(getattr(request, "param", "s3")) as opened:
        yield opened
