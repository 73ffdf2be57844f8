from typing import Any

import pytest
import torch

from spotune_serve.engine.decoding_batch import DecodingBatch
from spotune_serve.engine.model import LoadedModel
from tests.serve.support.generating import Collected, request, sequence
from tests.serve.support.toy_models import toy_model


@pytest.mark.parametrize("family", ["llama", "t5"])
@torch.inference_mode()
def test_padding_leaves_with_the_longest_sequence(family: str) -> None:
    model = LoadedModel(toy_model(family))
    batch = DecodingBatch(model, "")
    for length in (4, 20, 6):
        added = sequence(model, request([5] * length, 30), Collected())
        logits, caches = model.prefill(added.request.prompt, added.decoder_ids)
        added.extend(logits[0], int(logits[0].argmax()))
        batch.add(added, caches)
    assert shapes(batch)[-1] == (3, 20)
    batch.keep([batch.sequences[0], batch.sequences[2]])
    assert shapes(batch)[-1] == (2, 6)
    batch.keep([])
    assert shapes(batch) == []


def shapes(batch: DecodingBatch) -> list[tuple[int, int]]:
    """Rows and tokens of each cache, that of the prompt last."""
    caches: list[Any] = batch._caches
    return [(layer.keys.size(0), layer.keys.size(2)) for cache in caches for layer in cache.layers[:1]]
