"""The layout of rows of 131,072 tokens: which layers are recomputed, and what waits in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.plan.layout import LayoutRequest, ModelTooLargeError, choose_layout
from spotune.plan.memory import GB
from tests.api.plan.test_layout import LLAMA_8B

LONG = replace(LLAMA_8B, sequence_length=131_072, global_batch_size=1, compiled=True, chunked_loss=True, lora_rank=16)
H200 = 150 * GB


def test_rows_of_131072_tokens_recompute_layers_on_one_gpu() -> None:
    choice = choose_layout(LONG, 1, H200, LayoutRequest(offload_activations="auto"))
    assert choice.layout.gradient_checkpointing
    assert choice.layout.micro_batch_size == 1
    assert not choice.layout.offload_activations
    assert "of all but" in choice.reason


def test_activations_are_offloaded_if_nothing_else_fits() -> None:
    with pytest.raises(ModelTooLargeError, match=r"does not fit"):
        choose_layout(LONG, 1, 80 * GB)
    choice = choose_layout(LONG, 1, 80 * GB, LayoutRequest(offload_activations="auto"))
    layers, tokens = LONG.architecture.decoder.layers, LONG.sequence_length
    recomputed = layers - choice.layout.kept_layers
    assert choice.layout.offload_activations
    assert "offloaded to the host" in choice.reason
    # Input and output of attention, and the logarithms of its denominators.
    assert choice.memory.activations.host_bytes == recomputed * tokens * (2 * 4096 * 2 + 32 * 4)


def test_activations_are_not_offloaded_to_a_host_without_the_memory() -> None:
    small_host = replace(LONG, host_memory_bytes=70 * GB)
    with pytest.raises(ModelTooLargeError, match=r"workers\.resources with 8\d\.\d GB of host memory"):
        choose_layout(small_host, 1, 80 * GB, LayoutRequest(offload_activations="auto"))
