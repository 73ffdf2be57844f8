"""Operations of batches, by the documents that are in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from spotune_trainer.data.batches import Row, collate
from spotune_trainer.models.flops import ModelShape
from spotune_trainer.models.mfu_meter import MfuMeter

SHAPE = ModelShape(1000, 2, 16)


def packed(*lengths: int) -> Row:
    return {"input_ids": np.arange(2, 2 + sum(lengths)), "lengths": np.array(lengths, dtype=np.int32)}


def flops(rows: Sequence[Row], multiple: int = 1) -> float:
    return MfuMeter(SHAPE, None).flops(collate(rows, "causal", pad_token_id=0, pad_to_multiple_of=multiple))


def test_rows_of_different_lengths_count_each_by_itself() -> None:
    rows = [{"input_ids": np.arange(2, 2 + length)} for length in (4, 10)]
    assert flops(rows) == SHAPE.flops(1, 4) + SHAPE.flops(1, 10) > SHAPE.flops(2, 7)


@pytest.mark.parametrize("multiple", [1, 16])
def test_tokens_of_packed_documents_attend_to_their_document_only(multiple: int) -> None:
    rows = [packed(5, 7), packed(3), packed(1, 1, 9)]
    expected = sum(SHAPE.flops(1, length) for length in (5, 7, 3, 1, 1, 9))
    assert flops(rows, multiple) == expected


def test_an_encoder_decoder_counts_the_target_of_each_row() -> None:
    shape = ModelShape(600, 2, 16, encoder_parameters=400, encoder_layers=3)
    rows = [{"input_ids": np.arange(2, 2 + n), "labels": np.arange(2, 2 + m)} for n, m in ((8, 2), (5, 6))]
    batch = collate(rows, "seq2seq", pad_token_id=0)
    assert MfuMeter(shape, None).flops(batch) == shape.flops(1, 8, 2) + shape.flops(1, 5, 6)


def test_a_mismatched_document_has_a_forward_pass_only() -> None:
    row = {"input_ids": np.arange(2, 11), "pair_lengths": np.array([5, 4]), "desirable": True}
    assert flops([row, row]) == 2 * SHAPE.flops(1, 5) + 2 * SHAPE.forward_flops(1, 4)
