"""Addmm fusion replaces sums of matrix products, and only these, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from spotune_trainer.engine.compile.addmm_fusion import AddmmFusion

Function = Callable[..., Any]


def two(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b + c @ b


def three_in_rows(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b).view(2, 3, 4) + (c @ b).view(2, 3, 4) + (a @ b).view(2, 3, 4)


def two_sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b + c @ b).relu() + (a @ b + a @ b).tanh()


def with_something_else(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b + c @ b + c.sum()


def also_used_alone(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    product = a @ b
    return product + c @ b, product.relu()


def scaled(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.add(a @ b, c @ b, alpha=2)


def doubled(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    product = a @ b
    return product + product


def broadcast(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b + c[:1] @ b


def in_views_of_other_shapes(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b).view(1, 6, 4) + c @ b


def of_two_precisions(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b + c.bfloat16() @ b.bfloat16()


def count(graph: fx.Graph, operation: Any) -> int:
    return sum(node.target is operation for node in graph.nodes)


@pytest.mark.parametrize(
    ("function", "sums", "products"),
    [
        (two, 1, 0),
        (three_in_rows, 1, 0),
        (two_sums, 2, 0),
        (with_something_else, 1, 0),  # that of the products alone
        (also_used_alone, 0, 2),
        (scaled, 0, 2),
        (doubled, 0, 1),
        (broadcast, 0, 2),
        (in_views_of_other_shapes, 0, 2),
        (of_two_precisions, 0, 2),
    ],
)
def test_sums_of_anything_else_than_products_are_not_fused(function: Function, sums: int, products: int) -> None:
    random = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=random) for shape in ((6, 5), (5, 4), (6, 5))]
    traced = make_fx(function, tracing_mode="fake")(*factors)
    AddmmFusion()(traced.graph)
    traced.recompile()
    assert count(traced.graph, torch.ops.spotune.sum_of_products.default) == sums
    assert count(traced.graph, torch.ops.aten.mm.default) == products
    torch.testing.assert_close(traced(*factors), function(*factors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_sum_equals_the_sum_of_the_products(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    lefts, rights = ([torch.randn(shape, generator=random).to(dtype) for _ in range(3)] for shape in ((7, 4), (4, 6)))
    kept = [each.clone() for each in (*lefts, *rights)]
    found = torch.ops.spotune.sum_of_products(lefts, rights)
    expected = sum(left.double() @ right.double() for left, right in zip(lefts, rights, strict=True))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=16 * torch.finfo(dtype).eps)
    assert all(torch.equal(*pair) for pair in zip(kept, (*lefts, *rights), strict=True))
