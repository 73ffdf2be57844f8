"""Recomputed layers keep their input and attention's output, and their gradients are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spotune.plan.activations import Workload, activation_bytes
from spotune.plan.config_reader import read_architecture
from spotune_trainer.engine.activations.recomputation import recompute_layers
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from tests.trainer.engine.activations.models import (
    CONFIG,
    TOKENS,
    attention_calls,
    base_of,
    compiled_attention_calls,
    differing,
    gradients,
    make_model,
)

LAYERS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize(("saves_attention", "calls"), [(True, LAYERS), (False, 2 * LAYERS - 1)])
def test_attention_is_computed_again_only_if_its_output_is_not_kept(saves_attention: bool, calls: int) -> None:
    expected, model = gradients(make_model(LAYERS)), make_model(LAYERS)
    kept = repeated_layers(model)[-1:]
    recompute_layers(model, kept, saves_attention=saves_attention)
    assert differing(gradients(model), expected) == []
    assert attention_calls(model) == calls


@pytest.mark.slow
@pytest.mark.long
def test_compiled_layers_with_dropout_are_recomputed_to_the_same_bits() -> None:
    """All bits of float32; in 16 bit, a tensor that is computed again within a kernel is not rounded."""
    whole, selective = make_model(LAYERS, adapter=True), make_model(LAYERS, adapter=True)
    compile_layers(base_of(whole))
    layers = repeated_layers(base_of(selective))
    compile_layers(base_of(selective), layers[:-1])
    assert differing(gradients(selective), gradients(whole)) == []
    assert compiled_attention_calls(selective) == LAYERS


def saved_bytes(layers: int) -> int:
    """Bytes that compiled layers save for the backward pass when all of them are recomputed."""
    model = make_model(layers)
    compile_layers(model, repeated_layers(model))
    gradients(model)  # compiles
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage: Any = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gradients(model)
    return sum(saved.values())


@pytest.mark.slow
def test_a_recomputed_layer_saves_the_bytes_of_the_plan() -> None:
    workload = Workload(
        1, TOKENS, bytes_per_element=4, compiled=True, gradient_checkpointing=True, saves_attention=True
    )
    planned = [
        activation_bytes(read_architecture(CONFIG | {"num_hidden_layers": layers}), workload).layers_bytes
        for layers in (LAYERS, LAYERS + 1)
    ]
    assert saved_bytes(LAYERS + 1) - saved_bytes(LAYERS) == planned[1] - planned[0]
