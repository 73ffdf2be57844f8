"""How much of a GPU's memory a replica takes for keys and values, without a GPU: its memory is made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from spotune.errors import JobError
from spotune_serve.deployment.config import ModelConfig
from spotune_serve.deployment.replica import start_engine
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.weights import load
from spotune_serve.engine.weights.gpu_memory import cached_token_bytes, cached_tokens_limit, memory_errors
from tests.serve.support.toy_models import toy_model

FOLDER = Path("/models/toy")
LLAMA_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key/value heads, head size, bytes of a number


def set_memory(monkeypatch: pytest.MonkeyPatch, free: int, total: int | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total or free))


@pytest.mark.parametrize(
    ("family", "values", "dtype", "size"),
    [
        ("llama", {}, torch.float32, LLAMA_BYTES),
        ("llama", {}, torch.bfloat16, LLAMA_BYTES // 2),
        ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 3}, torch.float32, LLAMA_BYTES * 3),
        ("gpt2", {}, torch.float32, 2 * 2 * 32 * 4),
        ("mistral", {}, torch.float32, LLAMA_BYTES),
        ("t5", {"num_decoder_layers": 3}, torch.float32, 2 * 3 * 4 * 8 * 4),
    ],
)
def test_bytes_of_a_token(family: str, values: dict[str, Any], dtype: torch.dtype, size: int) -> None:
    module: torch.nn.Module = toy_model(family, **values)
    model: Any = module.to(dtype)
    assert cached_token_bytes(LoadedModel(model)) == size


def test_half_of_the_free_memory_is_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama"))
    set_memory(monkeypatch, free=2000 * LLAMA_BYTES)
    assert cached_tokens_limit(model, FOLDER, most=65_536) == 1000
    assert cached_tokens_limit(model, FOLDER, most=800) == 800


def test_a_replica_leaves_the_others_their_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama"))
    set_memory(monkeypatch, free=9000 * LLAMA_BYTES, total=10_000 * LLAMA_BYTES)
    assert cached_tokens_limit(model, FOLDER, most=65_536, share=0.25) == 1250
    assert cached_tokens_limit(model, FOLDER, most=65_536) == 4500


def test_no_memory_for_the_cache_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    relative = LoadedModel(toy_model("bloom"))  # has no maximum length of its own
    set_memory(monkeypatch, free=1023 * cached_token_bytes(relative))
    message = (
        r"no memory left for the key/value cache of the model in /models/toy.* 511 tokens.* at least 512 .*gpus: 2"
    )
    with pytest.raises(JobError, match=message):
        cached_tokens_limit(relative, FOLDER, most=65_536)
    set_memory(monkeypatch, free=1024 * cached_token_bytes(relative))
    assert cached_tokens_limit(relative, FOLDER, most=65_536) == 512


def test_a_model_of_short_sequences_needs_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama", max_position_embeddings=64))
    set_memory(monkeypatch, free=128 * LLAMA_BYTES)
    assert cached_tokens_limit(model, FOLDER, most=65_536) == 64
    set_memory(monkeypatch, free=126 * LLAMA_BYTES)
    with pytest.raises(JobError, match="at least 64 are needed"):
        cached_tokens_limit(model, FOLDER, most=65_536)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_no_memory_for_the_weights_names_the_fix(error: type[Exception]) -> None:
    message = r"/models/toy does not fit into the GPU's memory: CUDA.*more memory"
    with pytest.raises(JobError, match=message), memory_errors(FOLDER):
        raise error("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
    with pytest.raises(error, match="illegal"), memory_errors(FOLDER):
        raise error("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A replica with a GPU, whose weights stay on the processors."""
    toy_model("llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    monkeypatch.setattr(load, "move_to", lambda *_: None)
    return ModelConfig(tmp_path, gpus=1, engine="transformers", threads=torch.get_num_threads())


def test_the_longest_sequence_of_a_replica_fits_into_its_memory(
    replica: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, free=2000 * LLAMA_BYTES)
    engine = start_engine(tmp_path, replica)
    asyncio.run(engine.close())
    assert engine.max_sequence_length == 1000


def test_a_replica_without_memory_for_the_cache_does_not_start(
    replica: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, free=100 * LLAMA_BYTES)
    with pytest.raises(JobError, match="no memory left for the key/value cache"):
        start_engine(tmp_path, replica)


def test_a_replica_without_memory_for_the_weights_does_not_start(
    replica: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.96 GiB.")

    monkeypatch.setattr(load, "move_to", fail)
    with pytest.raises(JobError, match=f"the model in {tmp_path} does not fit into the GPU's memory: .*14.96 GiB"):
        start_engine(tmp_path, replica)
