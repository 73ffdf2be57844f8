"""Padding, loss positions, packed rows and the hashes that prove which rows were trained on."""

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


def test_rows_are_padded_on_the_right_and_padding_carries_no_loss() -> None:
    batch = collate([causal_row(5, 6, 7, prompt=1), causal_row(8, 9)], "causal", pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [8, 9, -100]]
    assert batch.attention_mask is None  # no token sees what is on its right
    assert batch.tokens == 3  # the first token of a row has nothing before it to be predicted from


def test_an_encoder_is_told_of_padding_where_there_is_any() -> None:
    long, short = ({"input_ids": tokens, "labels": [9]} for tokens in ([5, 6, 7], [8, 9]))
    padded = collate([long, short], "seq2seq", pad_token_id=0)
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert collate([long, long], "seq2seq", pad_token_id=0).attention_mask is None


def test_widths_are_a_multiple_of_what_is_asked_for() -> None:
    batch = collate([causal_row(5, 6, 7), causal_row(8, 9)], "causal", pad_token_id=0, width_multiple=4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert batch.labels.shape == (2, 4)


def test_seq2seq_labels_have_a_length_of_their_own() -> None:
    rows: list[Row] = [{"input_ids": [1, 2, 3], "labels": [4]}, {"input_ids": [1], "labels": [5, 6]}]
    batch = collate(rows, "seq2seq", pad_token_id=0)
    assert batch.labels.tolist() == [[4, -100], [5, 6]]
    assert batch.tokens == 3


def test_hashes_of_the_tensors_are_those_of_the_stored_rows() -> None:
    rows = [causal_row(5, 6, 7, prompt=1), causal_row(8, 9), packed(causal_row(1, 2), causal_row(3, 4, 5))]
    for part in (rows[:2], rows[2:]):
        batch = collate(part, "causal", pad_token_id=0, sample_ids=[40 + i for i in range(len(part))])
        assert batch.row_hashes() == [row_hash(40 + i, row) for i, row in enumerate(part)]


@pytest.mark.parametrize(
    "changed", [(4, causal_row(5, 6)), (3, causal_row(5, 7)), (3, causal_row(5, 6, prompt=1)), (3, causal_row(5, 6, 0))]
)
def test_another_id_token_label_or_length_changes_the_hash(changed: tuple[int, Row]) -> None:
    assert row_hash(*changed) != row_hash(3, causal_row(5, 6))


def test_combined_hashes_ignore_order_but_not_repetition_or_loss() -> None:
    hashes = [row_hash(i, causal_row(i, i)) for i in range(4)]
    assert combine_hashes(hashes) == combine_hashes(hashes[::-1])
    assert combine_hashes(hashes) != combine_hashes(hashes[1:])
    assert combine_hashes(hashes) != combine_hashes([*hashes, hashes[0], hashes[0]])


def test_moving_a_batch_moves_its_tensors_alone() -> None:
    batch = collate([causal_row(1, 2)], "causal", pad_token_id=0)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.labels.device.type == "meta"
    assert moved.tokens == batch.tokens
    assert batch.input_ids.device.type == "cpu"


def test_packed_documents_have_the_loss_of_separate_ones() -> None:
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
        packed_loss = model(**together.model_inputs()).loss * together.tokens
        separate_loss = sum(model(**batch.model_inputs()).loss * batch.tokens for batch in apart)
    assert together.tokens == sum(batch.tokens for batch in apart) == 6
    torch.testing.assert_close(packed_loss, separate_loss)


def test_documents_begin_where_they_do_and_padding_is_one_more() -> None:
    rows = [packed(causal_row(5, 6, 7), causal_row(8, 9)), causal_row(4, 4, 4, 4, 4, 4), packed(causal_row(3))]
    batch = collate(rows, "causal", pad_token_id=0)
    assert batch.document_starts is not None
    assert batch.document_starts.dtype == torch.int32
    assert sorted({*batch.document_starts.tolist()}) == [0, 3, 5, 6, 12, 13, 18]
    assert batch.document_starts.tolist() == sorted(batch.document_starts.tolist())
    assert len(batch.document_starts) == 8
    assert collate([causal_row(5, 6)], "causal", pad_token_id=0).document_starts is None


@pytest.mark.parametrize(("documents", "starts"), [(2, 4), (3, 8), (6, 8), (7, 16)])
def test_batches_of_many_documents_have_few_shapes(documents: int, starts: int) -> None:
    batch = collate([packed(*[causal_row(5)] * documents)], "causal", pad_token_id=0)
    assert batch.document_starts is not None
    assert len(batch.document_starts) == starts
