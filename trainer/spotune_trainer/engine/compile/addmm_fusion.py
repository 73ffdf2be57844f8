"""Addmm fusion: a torch.compile pass by which the gradient of a shared input is summed within the matrix products.

Where several linear modules read one input (query, key and value projections; gate and up projections) the gradient of
that input is a sum of matrix products. The compiler gives each product memory of its own and adds them in another
kernel. cuBLAS can start from the sum so far (addmm), which saves the memory and the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


class AddmmFusion(CustomGraphPass):
    """Replaces each sum of matrix products by one `sum_of_products`; runs on graphs that autograd has traced."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the sums, outermost first: that takes in the sums inside."""
        for node in reversed(list(graph.nodes)):
            products = _products(node) if node.target is _aten.add.Tensor else None
            if products is not None and _are_distinct(products) and len(set(map(_shape_and_dtype, products))) == 1:
                _replace(graph, node, products)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Key of this pass in torch.compile's cache: it changes with this file."""
        return get_hash_for_files((__file__,))


def _products(term: fx.Node) -> list[fx.Node] | None:
    """The matrix products (`mm`) that add up to a term, through views; None if it depends on anything else."""
    if term.target is _aten.mm.default:
        return [term]
    is_sum = term.target is _aten.add.Tensor and not term.kwargs
    if not is_sum and term.target not in _VIEWS:
        return None
    products = list[fx.Node]()
    for operand in term.args if is_sum else term.args[:1]:
        # An operand with another user must exist by itself.
        found = _products(operand) if isinstance(operand, fx.Node) and len(operand.users) == 1 else None
        if found is None or (is_sum and _shape_and_dtype(operand) != _shape_and_dtype(term)):
            return None
        products += found
    return products


def _are_distinct(nodes: list[fx.Node]) -> bool:
    return len(set(nodes)) == len(nodes)


def _shape_and_dtype(node: Any) -> tuple[Any, ...]:
    """Of the tensor that a node computes."""
    value = node.meta["val"]
    return (*value.shape, value.dtype)


def _replace(graph: fx.Graph, node: fx.Node, products: list[fx.Node]) -> None:
    with graph.inserting_before(node):
        lefts, rights = ([product.args[side] for product in products] for side in (0, 1))
        total = graph.call_function(torch.ops.spotune.sum_of_products.default, (lefts, rights))
        total.meta["val"] = products[0].meta["val"]
        viewed = graph.call_function(_aten.view.default, (total, list(node.meta["val"].shape)))
        viewed.meta = dict(node.meta)
    node.replace_all_uses_with(viewed)
    graph.erase_node(node)


@torch.library.custom_op("spotune::sum_of_products", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def sum_of_products(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """lefts[0] @ rights[0] + lefts[1] @ rights[1] + ...; the sum is rounded to their precision after each product."""
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        torch.addmm(total, left, right, out=total)
    return total


@sum_of_products.register_fake
def _(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1])
