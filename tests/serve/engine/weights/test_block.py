"""Weights in one block of memory."""

import pytest
import torch
from transformers import PreTrainedModel

from spotune_serve.engine.weights.block import attach, bytes_of, checksum, fill, layout_of, move_to, weights_of
from tests.serve.support.generating import ask, request
from tests.serve.support.toy_models import prompts, toy_model


def moved(model: PreTrainedModel) -> PreTrainedModel:
    module: torch.nn.Module = model
    move_to(module, torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bloom", "t5", "bart"])
def test_model_in_a_block_answers_as_before(family: str) -> None:
    asked = [request(prompt) for prompt in prompts(3)]
    assert ask(moved(toy_model(family)), asked) == ask(toy_model(family), asked)


def test_every_parameter_and_buffer_is_a_part_of_the_block() -> None:
    model: torch.nn.Module = moved(toy_model("llama"))
    weights = weights_of(model)
    assert "model.rotary_emb.inv_freq" in weights  # computed by the model, in no file
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights.values()}) == 1


def test_tied_weights_stay_tied_and_lie_in_the_block_once() -> None:
    model = moved(toy_model("llama", tie_word_embeddings=True))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    assert inputs.weight is outputs.weight
    untied = layout_of(weights_of(toy_model("llama", tie_word_embeddings=False)))
    assert len(layout_of(weights_of(model))) == len(untied) - 1


def test_types_shapes_and_bits_are_kept() -> None:
    weights = {
        "odd": torch.arange(7, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    layout = layout_of(weights)
    assert all(entry.offset % 256 == 0 for entry in layout)
    block = torch.zeros(bytes_of(layout), dtype=torch.uint8)
    fill(block, weights, layout)
    attach(weights, block, layout)
    for name, tensor in weights.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_checksum_notices_one_changed_bit() -> None:
    block = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = checksum(block)
    block[1234] ^= 1
    assert checksum(block) != before
