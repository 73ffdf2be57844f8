"""QLoRA: frozen matrices in 4 bits, adapters trained with them, and the export."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.models.flops import ModelShape
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.pretrained import build_model
from spotune_trainer.models.quantization.nf4 import (
    BLOCK_ELEMENTS,
    NF4_VALUES,
    Linear4bit,
    dequantize,
    quantize,
    quantize_layers,
)
from tests.trainer.support.runs import STEPS, Layout, Runs, committed_state, losses, train_generation

LARGEST_GAP = max(above - below for below, above in pairwise(NF4_VALUES))
floats = st.floats(-1e6, 1e6, width=32)


@given(values=st.lists(floats, min_size=1, max_size=200))
def test_the_error_is_at_most_half_a_step_and_quantizing_again_changes_nothing(values: list[float]) -> None:
    tensor = torch.tensor(values)
    shape = (1, len(values))
    codes, scales = quantize(tensor)
    assert codes.numel() * 2 == scales.numel() * BLOCK_ELEMENTS
    found = dequantize(codes, scales, shape, torch.float32)
    of_each = scales.repeat_interleave(BLOCK_ELEMENTS)[: len(values)]
    assert bool(((found - tensor).abs() <= of_each * (LARGEST_GAP / 2 + 1e-6) + 1e-37).all())
    again = dequantize(*quantize(found), shape, torch.float32)
    assert torch.equal(again, found)


def test_the_16_values_are_the_quantiles_of_qlora() -> None:
    """Appendix E: quantiles of the normal distribution on either side of an exact zero, 8 above it and 7 below."""
    offset = 0.9677083
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9)[:-1])
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8)[:-1])
    expected = torch.cat([above, torch.zeros(1), below]).sort().values
    torch.testing.assert_close(torch.tensor(NF4_VALUES), expected / expected.abs().max(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_its_dequantized_matrix(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(13, 7, bias=bias, dtype=dtype)
    quantized = Linear4bit(layer).to(torch.bfloat16).to(dtype)  # as DeepSpeed casts a model
    matrix = dequantize(*quantize(layer.weight.detach()), (7, 13), dtype)
    given, expected = (torch.randn(2, 5, 13).to(dtype).requires_grad_() for _ in range(2))
    expected.data.copy_(given.data)
    found: Any = quantized(given)
    wanted: Any = F.linear(expected, matrix, quantized.bias)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)
    assert not list(quantized.state_dict().keys() - {"bias"})


def qlora(runs: Runs, task: str, dtype: str = "float32", **sections: Any) -> FinetuneJob:
    """A job that trains an adapter for the weights in a folder, quantized to 4 bits."""
    adapter = {"lora": {"r": 4, "alpha": 12, "dropout": 0.1}, "quantization": "nf4"}
    job = runs.job(task, dtype, adapter=adapter)
    source = Path(job.spec.model.source)
    if not (source / "model.safetensors").exists():
        build_model(runs.job(task, adapter=adapter)).save_pretrained(source)  # other tests use it, too: in float32
    return runs.job(task, dtype, model={"initialise": "pretrained"}, adapter=adapter, **sections)


def test_all_matrices_but_embeddings_and_output_projection_are_quantized(runs: Runs) -> None:
    model = attach_adapter(build_model(qlora(runs, "causal")), qlora(runs, "causal"))
    linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}
    assert linear == {"base_layer"}
    assert sum(isinstance(layer, Linear4bit) for layer in model.modules()) == 2 * 7
    whole = {name for name, place in model.named_parameters() if not place.requires_grad and place.ndim == 2}
    assert whole == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(("task", "dtype"), [("causal", "bfloat16"), ("seq2seq", "float32")])
def test_a_model_that_is_quantized_as_it_is_read_has_the_same_codes(runs: Runs, task: str, dtype: str) -> None:
    job = qlora(runs, task, dtype)
    read = build_model(job, quantized=True)
    whole = attach_adapter(build_model(job), job)
    assert "quantization_config" not in read.config.to_dict()
    assert not read.is_quantized
    assert ModelShape.from_model(read) == ModelShape.from_model(build_model(job))
    found, expected = attach_adapter(read, job), whole
    assert dict(found.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name)), name
    for name, parameter in found.named_parameters():
        assert parameter.requires_grad is expected.get_parameter(name).requires_grad
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert any(isinstance(module, Linear4bit) for module in found.modules())


@pytest.mark.slow
@pytest.mark.parametrize(("task", "dtype"), [("causal", "bfloat16"), ("seq2seq", "float32")])
def test_an_interrupted_run_ends_with_the_same_matrices(runs: Runs, task: str, dtype: str) -> None:
    resumed, undisturbed = runs.with_and_without_loss(qlora(runs, task, dtype), Layout(2, 2))
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert {name.split(".")[-3] for name in wanted} == {"lora_A", "lora_B"}
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    exported = [(run.export / "model.safetensors").read_bytes() for run in (resumed, undisturbed)]
    assert exported[0] == exported[1]


@pytest.mark.slow
def test_training_is_equal_at_every_layout(runs: Runs) -> None:
    found = []
    for layout in (Layout(1, 0), Layout(3, 1), Layout(2, 2)):
        run = runs.empty("qlora")
        train_generation(run, qlora(runs, "causal"), layout)
        found.append(losses(run))
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
def test_the_export_is_the_unquantized_source_plus_the_product_of_the_matrices(runs: Runs) -> None:
    job, run = qlora(runs, "causal"), runs.empty("qlora")
    train_generation(run, job, Layout(1, 0))
    base, exported = dict(build_model(job).named_parameters()), load_file(run.export / "model.safetensors")
    matrices = committed_state(run, STEPS)
    module = "model.layers.0.self_attn.q_proj"
    shapes = {"A": (4, 16), "B": (16, 4)}
    a, b = (matrices[f"{module}.lora_{side}.default.weight/fp32"].view(shape) for side, shape in shapes.items())
    torch.testing.assert_close(exported[f"{module}.weight"], base[f"{module}.weight"] + 12 / 4 * b @ a)
    assert torch.equal(exported["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_model_without_linear_layers_is_refused() -> None:
    sizes: dict[str, Any] = {"n_embd": 4, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    with pytest.raises(JobError, match=r"adapter\.quantization: nf4 needs layers of type torch\.nn\.Linear"):
        quantize_layers(GPT2LMHeadModel(GPT2Config(**sizes)))
