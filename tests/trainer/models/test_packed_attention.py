"""Packed attention trains as a mask does. A plain kernel takes the place of the GPU kernel here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spotune_trainer.data.batches import Batch, collate
from spotune_trainer.models import packed_attention
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.models.packed_attention import (
    MODEL_TYPES,
    enable_packed_attention,
    flash_attention,
    uses_packed_attention,
)

VOCABULARY = 50
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def make_model(model_type: str, **values: Any) -> Any:
    make_config: Any = CONFIG_MAPPING[model_type]
    torch.manual_seed(3)
    auto_model: Any = AutoModelForCausalLM
    return auto_model.from_config(make_config(**{**CONFIG, **values}))


def packed_batch() -> Batch:
    random = np.random.default_rng(5)
    rows = []
    for lengths in ([5, 3, 4], [12], [2, 7]):
        tokens = random.integers(2, VOCABULARY, sum(lengths))
        rows.append({"input_ids": tokens, "lengths": np.array(lengths, dtype=np.int32)})
    return collate(rows, "causal", pad_token_id=0, pad_to_multiple_of=8)


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: tuple[int, int],
) -> Tensor:
    """What PyTorch's kernel computes, document by document: tokens first, [tokens, heads, head size]."""
    before, after = window
    assert after == 0
    documents = []
    for start, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        assert end - start <= longest
        position = torch.arange(end - start)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance <= (before if before >= 0 else end))
        asked, keys, values = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
        if end > start:
            attended = functional.scaled_dot_product_attention(
                asked, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True
            )
            documents.append(attended[0].transpose(0, 1))
    return torch.cat(documents)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "flash_attention", plain_kernel)
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda dtype: True)


def loss_and_gradients(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = summed_loss(model, batch)
    torch.autograd.backward(loss)
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        *((model_type, {}) for model_type in sorted(MODEL_TYPES)),
        ("mistral", {"sliding_window": 3}),
        ("mistral", {"sliding_window": 4096}),
        ("phi3", {"sliding_window": 3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
)
def test_packed_attention_trains_as_a_mask_does(model_type: str, values: dict[str, Any]) -> None:
    model = make_model(model_type, **values)
    with_mask, expected = loss_and_gradients(model, packed_batch())
    assert enable_packed_attention(model)
    without, found = loss_and_gradients(model, packed_batch())
    assert without == pytest.approx(with_mask.item(), rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_a_token_of_one_document_does_not_change_another() -> None:
    model = make_model("llama")
    enable_packed_attention(model)
    batch = packed_batch()
    inputs = {**batch.model_inputs(), "cu_seq_lens_q": batch.cu_seq_lens}
    del inputs["labels"]
    before = model(**inputs).logits
    batch.input_ids[0, 6] += 1  # of the second document of the first row
    after = model(**inputs).logits
    changed = (before != after).any(-1)
    assert changed[0].tolist() == [5 < position < 8 for position in range(16)]
    assert not changed[1:].any()


@pytest.mark.usefixtures("kernel")
def test_unpacked_batches_and_generation_are_unchanged(tmp_path: Path) -> None:
    model = make_model("llama")
    batch = collate([{"input_ids": np.arange(2, 9)}, {"input_ids": np.arange(2, 6)}], "causal", pad_token_id=0)
    tokens = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]])
    prompt = {"input_ids": tokens, "attention_mask": tokens.gt(0).long(), "max_new_tokens": 4, "do_sample": False}
    expected, answers = loss_and_gradients(model, batch), model.generate(**prompt)
    enable_packed_attention(model)
    found = loss_and_gradients(model, batch)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert torch.equal(model.generate(**prompt), answers)
    model.save_pretrained(tmp_path)
    assert "documents" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("gemma", {"head_dim": 512}),
        ("gemma", {"head_dim": 12}),
        ("gemma2", {}),
        ("llama", {"attn_implementation": "eager"}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("kernel")
def test_models_that_the_kernel_does_not_support_keep_the_mask(model_type: str, values: dict[str, Any]) -> None:
    model = make_model(model_type, **values)
    assert not enable_packed_attention(model)
    assert not uses_packed_attention(model)


def test_packed_attention_needs_a_gpu() -> None:
    assert not enable_packed_attention(make_model("llama"))


def test_the_operator_supports_grouped_query_attention_and_is_the_flash_kernel() -> None:
    query = torch.empty(12, 4, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    shared = torch.empty(12, 2, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    starts = torch.zeros(4, dtype=torch.int32, device="meta")
    attended = flash_attention(query, shared, shared, starts, 6, 0.5, (-1, 0))
    assert attended.shape == query.shape
    torch.autograd.backward(attended.sum())
    assert shared.grad is not None
    assert shared.grad.shape == shared.shape
    arguments = {each.name: each for each in torch.ops.torch_attn._varlen_attn.default._schema.arguments}
    assert list(arguments)[:10] == [
        *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
        *("is_causal", "scale", "window_size"),
    ]
    assert arguments["backend"].default_value == SDPBackend.FLASH_ATTENTION.value


@pytest.mark.usefixtures("kernel")
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_packed_attention_works_with_an_adapter() -> None:
    model = make_model("llama")
    enable_packed_attention(model)
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert uses_packed_attention(adapted)
    expected = summed_loss(model, packed_batch()).item()
    assert summed_loss(adapted, packed_batch()).item() == pytest.approx(expected, rel=1e-6)
