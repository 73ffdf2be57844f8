"""Offloaded activations come back with the same bits, and host memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spotune_trainer.engine.activations.offload import ActivationOffload
from spotune_trainer.engine.activations.recomputation import recompute_layers
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from tests.trainer.engine.activations.models import CONFIG, TOKENS, differing, gradients, make_model

LAYERS = 4
INPUT_BYTES = TOKENS * CONFIG["hidden_size"] * 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class CountedOffload(ActivationOffload):
    """Counts what is moved in each direction."""

    def __init__(self, smallest_bytes: int) -> None:
        super().__init__(smallest_bytes)
        self.out = self.back = 0
        to_host, to_device = self._transfers.to_host, self._transfers.to_device

        def counted_out(tensor: torch.Tensor) -> Any:
            self.out += 1
            assert tensor.nbytes == INPUT_BYTES
            return to_host(tensor)

        def counted_back(moved: list[Any]) -> Any:
            self.back += len(moved)
            return to_device(moved)

        self._transfers.to_host, self._transfers.to_device = counted_out, counted_back  # type: ignore[method-assign]

    @property
    def free_buffers(self) -> int:
        """Pieces of host memory that can be used again."""
        return sum(len(buffers) for buffers in self._transfers._free.values())


def offloaded(model: Any, layers: list[Any]) -> CountedOffload:
    offload = CountedOffload(INPUT_BYTES)
    for layer in layers:
        layer.forward = offload.wrap(layer, layer.forward)
    return offload


def documents() -> torch.Tensor:
    """Positions of two documents in a row."""
    return torch.cat([torch.arange(TOKENS // 4), torch.arange(TOKENS - TOKENS // 4)])[None]


def test_inputs_of_recomputed_layers_wait_on_the_host() -> None:
    expected, model = gradients(make_model(LAYERS), position_ids=documents()), make_model(LAYERS)
    layers = repeated_layers(model)
    recompute_layers(model, layers[-1:], saves_attention=False)
    offload = offloaded(model, layers[:-1])
    for step in (1, 2):
        assert differing(gradients(model, position_ids=documents()), expected) == []
        # Double buffering: the last two of the three layers are still on the device.
        assert (offload.out, offload.back) == (3 * step, step)
        assert offload.free_buffers == 3


@pytest.mark.slow
@pytest.mark.long
def test_compiled_layers_offload_their_input_and_attention() -> None:
    plain, model = make_model(LAYERS), make_model(LAYERS)
    compile_layers(plain, repeated_layers(plain))
    layers = compile_layers(model, repeated_layers(model))
    offload = offloaded(model, layers)
    assert differing(gradients(model), gradients(plain)) == []
    assert (offload.out, offload.back) == (2 * LAYERS, 2 * (LAYERS - 2))


def test_a_model_that_is_evaluated_moves_nothing() -> None:
    model = make_model(LAYERS)
    offload = offloaded(model, repeated_layers(model))
    with torch.no_grad():
        model(input_ids=torch.arange(TOKENS)[None] % CONFIG["vocab_size"])
    model.eval()(input_ids=torch.arange(TOKENS)[None] % CONFIG["vocab_size"])
    assert offload.out == 0
