"""Model FLOPs utilization equals published numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM, T5Config

from spotune_trainer.models.flops import ModelShape, mfu, peak_flops


@pytest.mark.parametrize(
    ("parameters", "layers", "hidden", "sequence", "tokens_per_second", "utilisation"),
    [
        # One H200, Llama 1.1B: 51.9k tokens/s are 40.4 %, 75.7k are 58.9 % (our own measurement, FLOPs of llm-foundry).
        (1_100_048_384, 22, 2048, 2048, 51_900, 0.404),
        (1_100_048_384, 22, 2048, 2048, 75_700, 0.589),
        # Llama 8B at 4,096 tokens: 11.9k tokens/s are 65.9 %.
        (8_030_261_248, 32, 4096, 4096, 11_900, 0.659),
    ],
)
def test_published_utilizations_are_reproduced(
    parameters: int, layers: int, hidden: int, sequence: int, tokens_per_second: float, utilisation: float
) -> None:
    shape = ModelShape(parameters, layers, hidden)
    peak = peak_flops("NVIDIA H200", "bfloat16")
    found = mfu(shape.flops(1, sequence), sequence / tokens_per_second, 1, peak)
    assert found == pytest.approx(utilisation, abs=0.003)


def test_a_row_costs_6n_and_12ldt_per_token() -> None:
    assert ModelShape(1000, 2, 16).flops(rows=3, sequence=10) == 3 * 10 * (6 * 1000 + 12 * 2 * 16 * 10)


def test_a_token_of_an_encoder_decoder_passes_only_encoder_or_decoder() -> None:
    shape = ModelShape(600, 2, 16, encoder_parameters=400, encoder_layers=3)
    encoder = 10 * (6 * 400 + 12 * 3 * 16 * 10)
    decoder = 4 * (6 * 600 + 12 * 2 * 16 * (4 + 10))
    assert shape.flops(rows=2, sequence=10, target=4) == 2 * (encoder + decoder)


def test_the_shape_of_a_decoder_counts_all_its_parameters() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, bos_token_id=0
    )
    model = LlamaForCausalLM(config)
    assert ModelShape.from_model(model) == ModelShape(sum(p.numel() for p in model.parameters()), 3, 16)


def test_the_shape_of_an_encoder_decoder_counts_shared_embeddings_once() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=2)
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    shape = ModelShape.from_model(model)
    assert (shape.layers, shape.encoder_layers, shape.hidden_size) == (3, 2, 16)
    assert shape.parameters + shape.encoder_parameters == sum(p.numel() for p in model.parameters())
    in_encoder = [p for name, p in model.named_parameters() if name.startswith("encoder.block")]
    assert shape.encoder_parameters == sum(p.numel() for p in in_encoder) + 16  # and its last normalisation


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "float16", 835.5e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("Tesla T4", "float16", 65e12),
        ("Tesla T4", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_the_peak_is_that_of_the_named_device(device: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak


def test_utilization_is_unknown_without_a_peak_or_time() -> None:
    assert mfu(1e12, 1.0, 1, None) is None
    assert mfu(1e12, 0.0, 1, 1e12) is None
    assert mfu(1e12, 2.0, 4, 1e12) == 0.125


def test_causal_flops_count_half_of_the_scores_within_each_document() -> None:
    shape = ModelShape(1000, 2, 16)
    assert shape.causal_flops([10]) == 10 * (6 * 1000 + 6 * 2 * 16 * 10)
    assert shape.causal_flops([4, 6]) == shape.causal_flops([4]) + shape.causal_flops([6]) < shape.causal_flops([10])
