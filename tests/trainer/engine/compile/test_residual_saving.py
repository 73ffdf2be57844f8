"""Compiled layers save the sums of residual connections instead of the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.engine.compile.gradient_accumulation_fusion import linear
from spotune_trainer.engine.compile.layers import compile_layers
from spotune_trainer.engine.compile.residual_saving import SaveResidualSums

pytestmark = pytest.mark.slow

Function = Callable[..., Tensor]


def residual(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + (rows @ weight).view(2, 3, 4), (4,))


def of_our_own_product(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + linear(rows, weight.T).view(2, 3, 4), (4,))


def with_a_bias(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + (rows @ weight + stream[0, 0]).view(2, 3, 4), (4,))


def of_an_adapter(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + (2 * (rows @ weight)).view(2, 3, 4), (4,))


def of_a_normed_product(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + functional.rms_norm(rows @ weight, (4,)).view(2, 3, 4), (4,))


def of_a_product_of_half_the_size(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + (rows.bfloat16() @ weight.bfloat16()).view(2, 3, 4), (4,))


def of_a_product_for_all_columns(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + (rows @ weight[:, :1]).view(2, 3, 1), (4,))


def of_no_product(stream: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(stream + stream.tanh(), (4,)) * (rows @ weight).view(2, 3, 4)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (residual, 1),
        (of_our_own_product, 1),
        (with_a_bias, 1),
        (of_an_adapter, 1),
        (of_a_normed_product, 0),  # the inner norm's gradient needs the product, so keeping the sum takes more memory
        (of_a_product_of_half_the_size, 0),
        (of_a_product_for_all_columns, 0),
        (of_no_product, 0),
    ],
)
def test_sums_are_saved_if_that_takes_no_more_memory(function: Function, kept: int) -> None:
    def both_passes(*inputs: Tensor) -> tuple[Tensor, ...]:
        output = function(*inputs)
        return output, *torch.autograd.grad(output.sum(), inputs)

    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=random).requires_grad_() for s in ((2, 3, 4), (6, 5), (5, 4))]
    graph = make_fx(both_passes, tracing_mode="fake")(*inputs).graph
    SaveResidualSums()(graph)
    assert sum("recompute" in node.meta for node in graph.nodes) == kept


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which the compiler looks at
def test_a_compiled_layer_saves_the_sum_instead_of_the_product() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes)).train()
    (layer,) = model.model.layers
    tokens, kept, terms = torch.arange(8)[None], list[Tensor](), dict[str, Tensor]()
    hooks = [
        layer.input_layernorm.register_forward_pre_hook(lambda _, inputs: terms.update(stream=inputs[0])),
        layer.self_attn.register_forward_hook(lambda _, __, outputs: terms.update(product=outputs[0])),
    ]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    compile_layers(model)

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.detach())
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        model(input_ids=tokens).logits.sum().backward()
    assert is_among(kept, terms["stream"] + terms["product"])
    assert not is_among(kept, terms["product"])


def is_among(kept: list[Tensor], expected: Tensor) -> bool:
    alike = [each.reshape(expected.shape) for each in kept if each.numel() == expected.numel()]
    return any(torch.allclose(each.float(), expected, atol=1e-5) for each in alike)
