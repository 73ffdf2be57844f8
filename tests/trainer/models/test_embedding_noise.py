"""NEFTune's noise: its scale and where it goes. Without padding it equals that of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.neftune import activate_neftune

from spotune.errors import JobError
from spotune_trainer.data.batches import Batch, Task, collate
from spotune_trainer.models.embedding_noise import EmbeddingNoise
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.loss import summed_loss
from tests.trainer.support.tiny import make_job

VOCABULARY = 64
SIZE = 256
"""Of an embedding: enough numbers for the bounds of their distribution to show."""
ALPHA = 5.0


def llama() -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)).train()


def with_adapter(model: Any, task: Task, modules: list[str]) -> Any:
    model.name_or_path = "/model"
    return attach_adapter(model, make_job("/model", task, adapter={"lora": {"r": 2, "targetModules": modules}}))


def llama_with_adapter() -> Any:
    return with_adapter(llama(), "causal", ["q_proj", "embed_tokens"])


def t5(dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"d_model": SIZE, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    special: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=dropout, **sizes, **special)
    return T5ForConditionalGeneration(config).train()


def t5_with_adapter() -> Any:
    return with_adapter(t5(), "seq2seq", ["q"])


def bart() -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = BartConfig(vocab_size=VOCABULARY, d_model=SIZE, dropout=0.0, **sizes, **special)
    return BartForConditionalGeneration(config).train()


def bart_with_one_embedding() -> Any:
    model = bart()
    model.set_input_embeddings(model.get_input_embeddings())
    assert model.get_encoder().get_input_embeddings() is model.get_decoder().get_input_embeddings()
    return model


def batch_of(task: Task, *lengths: int, labels: tuple[int, ...] = ()) -> Batch:
    """Rows of random tokens; those of a seq2seq batch have labels of other lengths."""
    random = np.random.default_rng(5)
    rows = [{"input_ids": random.integers(2, VOCABULARY, length)} for length in lengths]
    for row, length in zip(rows, labels, strict=False):
        row["labels"] = random.integers(2, VOCABULARY, length)
    return collate(rows, task, pad_token_id=0)


def packed_batch() -> Batch:
    random = np.random.default_rng(5)
    rows = [
        {"input_ids": random.integers(2, VOCABULARY, sum(lengths)), "lengths": np.array(lengths, dtype=np.int32)}
        for lengths in ([9, 4, 16], [25])
    ]
    return collate(rows, "causal", pad_token_id=0, pad_to_multiple_of=8)


def added_noise(model: Any, batch: Batch) -> list[Tensor]:
    """What a forward pass with noise adds to the embeddings of a model: of its encoder, then of its decoder."""
    noise = EmbeddingNoise(model, ALPHA)
    parts = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
    observed: list[Tensor] = []
    for module in {part.get_input_embeddings() for part in parts}:
        module.register_forward_hook(lambda module, inputs, output: observed.append(output.detach()))
    summed_loss(model, batch)
    with noise.added(batch):
        summed_loss(model, batch)
    assert len(observed) == 2 * len(parts)
    return [noisy - plain for plain, noisy in zip(observed, observed[len(parts) :], strict=False)]


def assert_uniform(noise: Tensor, tokens: int) -> None:
    """Whether the noise of a sequence is uniform within NEFTune's bound, ``[tokens, d]``."""
    assert len(noise) == tokens
    bound = ALPHA / math.sqrt(tokens * SIZE)
    assert bound * 0.98 < noise.max().item() <= bound * 1.0001
    assert -bound * 0.98 > noise.min().item() >= -bound * 1.0001
    assert noise.mean().item() == pytest.approx(0.0, abs=0.06 * bound)
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("make_model", [llama, llama_with_adapter])
def test_rows_without_padding_get_the_noise_of_transformers(make_model: Any) -> None:
    batch = batch_of("causal", 12, 12, 12)
    ours, theirs = make_model(), make_model()
    noise = EmbeddingNoise(ours, ALPHA)
    torch.manual_seed(11)
    with noise.added(batch):
        found = summed_loss(ours, batch)
    activate_neftune(theirs, ALPHA)
    torch.manual_seed(11)
    expected = summed_loss(theirs, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.item() != pytest.approx(summed_loss(make_model(), batch).item(), rel=1e-4)


def test_padding_does_not_count_for_the_scale() -> None:
    (found,) = added_noise(llama(), batch_of("causal", 40, 5))
    assert_uniform(found[0], 40)
    assert_uniform(found[1, :5], 5)


def test_each_document_of_a_row_has_a_scale_of_its_own() -> None:
    (found,) = added_noise(llama(), packed_batch())
    assert found.shape == (2, 32, SIZE)
    for row, start, tokens in ((0, 0, 9), (0, 9, 4), (0, 13, 16), (1, 0, 25)):
        assert_uniform(found[row, start : start + tokens], tokens)


@pytest.mark.parametrize("make_model", [t5, t5_with_adapter, bart, bart_with_one_embedding])
def test_encoder_and_decoder_get_noise_for_the_lengths_of_their_own_sequences(make_model: Any) -> None:
    encoder, decoder = added_noise(make_model(), batch_of("seq2seq", 30, 12, labels=(6, 20)))
    for row, tokens in enumerate((30, 12)):
        assert_uniform(encoder[row, :tokens], tokens)
    for row, tokens in enumerate((6, 20)):
        assert_uniform(decoder[row, :tokens], tokens)


def test_other_forward_passes_get_no_noise() -> None:
    model, batch = llama(), batch_of("causal", 12, 5)
    expected = summed_loss(model, batch)
    noise = EmbeddingNoise(model, ALPHA)
    with noise.added(batch):
        summed_loss(model, batch)
    assert torch.equal(summed_loss(model, batch), expected)
    assert torch.equal(summed_loss(model.eval(), batch), expected)


def test_the_noise_follows_from_the_seed() -> None:
    model, batch = llama(), batch_of("causal", 12, 5)
    noise = EmbeddingNoise(model, ALPHA)
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        with noise.added(batch):
            losses.append(summed_loss(model, batch).item())
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # as engine/build.py calls it
def test_gradient_checkpointing_does_not_change_noise_or_dropout() -> None:
    batch = batch_of("seq2seq", 12, 5, labels=(4, 9))
    results = []
    for checkpointing in (False, True):
        model = t5(dropout=0.1)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        noise = EmbeddingNoise(model, ALPHA)
        torch.manual_seed(1)
        with noise.added(batch):
            loss = summed_loss(model, batch)
        torch.autograd.backward(loss)
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def test_a_model_that_does_not_use_its_embeddings_is_refused() -> None:
    model, batch = llama(), batch_of("causal", 12)
    unused = torch.nn.Embedding(VOCABULARY, SIZE)
    model.get_input_embeddings = lambda: unused
    noise = EmbeddingNoise(model, ALPHA)
    reason = r"training\.neftuneNoiseAlpha: the model does not use the embeddings"
    with pytest.raises(JobError, match=reason), noise.added(batch):
        summed_loss(model, batch)
