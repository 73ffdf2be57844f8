"""Padding, loss positions, packed rows and row hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.data.batches import collate, combine_hashes, row_hash

Row = dict[str, Any]


def causal_row(*ids: int, prompt: int = 0) -> Row:
    row: Row = {"input_ids": np.array(ids, dtype=np.int32)}
    if prompt:
        row["labels"] = np.array([-100] * prompt + list(ids[prompt:]), dtype=np.int32)
    return row


def packed(*documents: Row) -> Row:
    ids = [row["input_ids"] for row in documents]
    return {"input_ids": np.concatenate(ids), "lengths": np.array([len(part) for part in ids], dtype=np.int32)}


def test_padding_is_on_the_right_and_carries_no_loss() -> None:
    batch = collate([causal_row(5, 6, 7, prompt=1), causal_row(8, 9)], "causal", pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [8, 9, -100]]
    assert batch.attention_mask is None  # causal tokens do not attend to padding on their right
    assert batch.loss_tokens == 3  # the first token of a row is not predicted
    assert batch.tokens == 5  # all that go through the model, without padding


def test_seq2seq_batches_have_a_mask_only_if_padded() -> None:
    long, short = ({"input_ids": tokens, "labels": [9]} for tokens in ([5, 6, 7], [8, 9]))
    padded = collate([long, short], "seq2seq", pad_token_id=0)
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert collate([long, long], "seq2seq", pad_token_id=0).attention_mask is None


def test_sequence_lengths_are_rounded_up_to_a_multiple() -> None:
    batch = collate([causal_row(5, 6, 7), causal_row(8, 9)], "causal", pad_token_id=0, pad_to_multiple_of=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert batch.labels.shape == (2, 4)


def test_seq2seq_labels_have_their_own_length() -> None:
    rows: list[Row] = [{"input_ids": [1, 2, 3], "labels": [4]}, {"input_ids": [1], "labels": [5, 6]}]
    batch = collate(rows, "seq2seq", pad_token_id=0)
    assert batch.labels.tolist() == [[4, -100], [5, 6]]
    assert batch.loss_tokens == 3
    assert batch.tokens == 4 + 3  # inputs of the encoder and of the decoder


def test_hashes_of_tensors_equal_those_of_stored_rows() -> None:
    rows = [causal_row(5, 6, 7, prompt=1), causal_row(8, 9), packed(causal_row(1, 2), causal_row(3, 4, 5))]
    for part in (rows[:2], rows[2:]):
        batch = collate(part, "causal", pad_token_id=0, sample_ids=[40 + i for i in range(len(part))])
        assert batch.row_hashes() == [row_hash(40 + i, row) for i, row in enumerate(part)]


@pytest.mark.parametrize(
    "changed", [(4, causal_row(5, 6)), (3, causal_row(5, 7)), (3, causal_row(5, 6, prompt=1)), (3, causal_row(5, 6, 0))]
)
def test_row_hash_depends_on_id_tokens_labels_and_length(changed: tuple[int, Row]) -> None:
    assert row_hash(*changed) != row_hash(3, causal_row(5, 6))


def test_combined_hash_ignores_order_but_not_missing_or_repeated_rows() -> None:
    hashes = [row_hash(i, causal_row(i, i)) for i in range(4)]
    assert combine_hashes(hashes) == combine_hashes(hashes[::-1])
    assert combine_hashes(hashes) != combine_hashes(hashes[1:])
    assert combine_hashes(hashes) != combine_hashes([*hashes, hashes[0], hashes[0]])


def test_to_returns_a_copy_with_moved_tensors() -> None:
    batch = collate([causal_row(1, 2)], "causal", pad_token_id=0)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.labels.device.type == "meta"
    assert moved.loss_tokens == batch.loss_tokens
    assert batch.input_ids.device.type == "cpu"


def test_packed_documents_have_the_same_loss_as_separate_ones() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    documents = [causal_row(3, 4, 5, 6), causal_row(7, 8), causal_row(9, 10, 11)]
    together = collate([packed(*documents[:2]), packed(documents[2])], "causal", pad_token_id=0)
    apart = [collate([document], "causal", pad_token_id=0) for document in documents]
    with torch.no_grad():
        packed_loss = model(**together.model_inputs()).loss * together.loss_tokens
        separate_loss = sum(model(**batch.model_inputs()).loss * batch.loss_tokens for batch in apart)
    assert together.loss_tokens == sum(batch.loss_tokens for batch in apart) == 6
    torch.testing.assert_close(packed_loss, separate_loss)


def test_cu_seq_lens_has_every_document_and_padding_as_one_more() -> None:
    rows = [packed(causal_row(5, 6, 7), causal_row(8, 9)), causal_row(4, 4, 4, 4, 4, 4), packed(causal_row(3))]
    batch = collate(rows, "causal", pad_token_id=0)
    assert batch.cu_seq_lens is not None
    assert batch.cu_seq_lens.dtype == torch.int32
    assert sorted({*batch.cu_seq_lens.tolist()}) == [0, 3, 5, 6, 12, 13, 18]
    assert batch.cu_seq_lens.tolist() == sorted(batch.cu_seq_lens.tolist())
    assert len(batch.cu_seq_lens) == 8
    assert collate([causal_row(5, 6)], "causal", pad_token_id=0).cu_seq_lens is None


@pytest.mark.parametrize(("documents", "length"), [(2, 4), (3, 8), (6, 8), (7, 16)])
def test_cu_seq_lens_is_padded_to_a_power_of_two(documents: int, length: int) -> None:
    batch = collate([packed(*[causal_row(5)] * documents)], "causal", pad_token_id=0)
    assert batch.cu_seq_lens is not None
    assert len(batch.cu_seq_lens) == length
