"""Fused linear cross-entropy has the loss and gradients that are computed from logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from spotune.plan.activations import CHUNK_LOGITS, CHUNKED_LOSS_MODELS
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES
from spotune_trainer.data.batches import NO_LOSS, Batch, Task, collate
from spotune_trainer.models import fused_linear_cross_entropy
from spotune_trainer.models.fused_linear_cross_entropy import LossHead, fuse_linear_cross_entropy
from spotune_trainer.models.loss import summed_loss

VOCABULARY = 50
SEQ2SEQ = ("bart", "mt5", "t5")
SIZES = {
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "mt5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def make_model(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model of this type, without dropout."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 0}
    make_config: Any = CONFIG_MAPPING[model_type]
    config = make_config(vocab_size=VOCABULARY, **SIZES.get(model_type, DECODER), **special)
    torch.manual_seed(1)
    auto_model: Any = AutoModelForSeq2SeqLM if model_type in SEQ2SEQ else AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=dtype)
    model.eval()
    return model


def make_rows() -> list[dict[str, Any]]:
    """Three rows of different lengths, whose first labels carry no loss."""
    random = np.random.default_rng(2)
    rows = []
    for length in (5, 9, 7):
        tokens = random.integers(2, VOCABULARY, length)
        rows.append({"input_ids": tokens, "labels": np.where(np.arange(length) < 2, NO_LOSS, tokens)})
    return rows


def make_batch(task: Task) -> Batch:
    """The rows as one batch."""
    return collate(make_rows(), task, pad_token_id=0)


def outcome(model: Any, batch: Batch, label_smoothing: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss, and gradients by parameter."""
    model.zero_grad()
    loss = summed_loss(model, batch, label_smoothing)
    scaled: Any = loss * 0.25
    scaled.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("model_type", sorted(CHUNKED_LOSS_MODELS))
def test_loss_and_gradients_equal_those_from_logits(
    model_type: str, label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_linear_cross_entropy, "CHUNK_LOGITS", 4 * VOCABULARY)  # chunks of at most four rows
    batch = make_batch("seq2seq" if model_type in SEQ2SEQ else "causal")
    model = make_model(model_type)
    expected_loss, expected = outcome(model, batch, label_smoothing)
    fuse_linear_cross_entropy(model, is_compiled=False)
    loss, gradients = outcome(model, batch, label_smoothing)
    assert fused_linear_cross_entropy.loss_head(model) is not None
    torch.testing.assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize(
    ("rows", "vocabulary", "expected"),
    [
        (32_768, 32_000, 4 * [8192]),
        (8192, 128_256, 4 * [2048]),
        (8000, 128_256, [2048, 2048, 2048, 1856]),
        (100, 32_000, [100]),
        (200, 32_000, [200]),
        (7, CHUNK_LOGITS, 7 * [1]),
    ],
)
def test_chunks_have_equal_rows_that_are_a_multiple_of_128(rows: int, vocabulary: int, expected: list[int]) -> None:
    chunk = fused_linear_cross_entropy._chunk_rows(rows, vocabulary)
    assert [min(chunk, rows - start) for start in range(0, rows, chunk)] == expected


@pytest.mark.long
def test_training_compiles_for_each_number_of_rows_and_evaluation_once() -> None:
    torch.compiler.reset()
    head = torch.nn.Linear(4, VOCABULARY)
    compiled = LossHead(head, is_compiled=True)
    graphs = []
    for training, lengths in ((False, (3, 5, 8)), (True, (3, 5, 8)), (True, (3, 5, 8)), (False, (6,))):
        head.train(training)
        counters.clear()
        for rows in lengths:
            hidden, labels = torch.randn(rows, 4), torch.arange(rows)
            with compiled.returning_loss(labels, 0.0):
                loss = head(hidden)
            logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 3, 0, 0]


@pytest.mark.parametrize("model_type", sorted(set(SUPPORTED_MODEL_TYPES) - set(SEQ2SEQ)))
def test_padding_does_not_change_the_loss_of_a_causal_model_without_a_mask(model_type: str) -> None:
    model, rows = make_model(model_type), make_rows()
    together = summed_loss(model, collate(rows, "causal", pad_token_id=0))
    alone = [summed_loss(model, collate([row], "causal", pad_token_id=0)) for row in rows]
    torch.testing.assert_close(together, torch.stack(alone).sum())


@pytest.mark.long
@pytest.mark.parametrize("is_training", [True, False])
def test_the_compiled_loss_in_bfloat16_is_close_to_that_from_logits(is_training: bool) -> None:
    batch, model = make_batch("causal"), make_model("llama", torch.bfloat16)
    expected_loss, expected = outcome(model, batch, 0.0)
    fuse_linear_cross_entropy(model, is_compiled=True)
    model.train(is_training)  # nothing in it drops out
    loss, gradients = outcome(model, batch, 0.0)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.05, atol=0.02)


def test_the_head_still_returns_logits_outside_of_the_context() -> None:
    model = make_model("llama")
    tokens = torch.arange(4)[None]
    expected = model(input_ids=tokens).logits
    fuse_linear_cross_entropy(model, is_compiled=False)
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_frozen_weights_get_no_gradient() -> None:
    batch, model = make_batch("causal"), make_model("llama")
    expected, _ = outcome(model, batch, 0.0)
    fuse_linear_cross_entropy(model, is_compiled=False)
    with torch.no_grad():
        loss = summed_loss(model, batch)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad


def test_a_non_finite_loss_leaves_no_finite_gradient() -> None:
    batch, model = make_batch("causal"), make_model("llama")
    fuse_linear_cross_entropy(model, is_compiled=False)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    loss = summed_loss(model, batch)
    spoiled: Any = loss * (1.0 + 0.0 * loss.detach())
    spoiled.backward()
    assert not torch.isfinite(loss)
    assert not torch.isfinite(model.lm_head.weight.grad).any()


@pytest.mark.parametrize("model_type", sorted(set(SUPPORTED_MODEL_TYPES) - CHUNKED_LOSS_MODELS))
def test_models_that_post_process_their_logits_are_not_fused(model_type: str) -> None:
    model = make_model(model_type)
    fuse_linear_cross_entropy(model, is_compiled=False)
    assert fused_linear_cross_entropy.loss_head(model) is None


def test_without_grad_only_the_logits_are_computed() -> None:
    batch = collate(make_rows(), "causal", 0)
    counted = []
    for fuse in (False, True):
        model = make_model("llama")
        if fuse:
            fuse_linear_cross_entropy(model, is_compiled=False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            summed_loss(model, batch)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]
