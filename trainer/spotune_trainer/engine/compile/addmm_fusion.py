"""Sums of matrix products in compiled layers, each product added by the multiplication that computes it.

Where several linear modules read one input (queries, keys and values; gate and up) the gradient of that input is a sum
of products. The compiler computes each into memory of its own and then adds them; cuBLAS can begin with the sum so far.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


class SumsOfProducts(CustomGraphPass):
    """Puts `sum_of_products` in the place of such sums; a pass of torch.compile over what autograd has made."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace them, outermost sums first."""
        for node in reversed(list(graph.nodes)):
            products = _products(node) if node.target is _aten.add.Tensor else None
            if products is not None and len(set(products)) == len(products) and len(set(map(_kind, products))) == 1:
                _replace(graph, node, products)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """By which the compiler knows whether it has compiled with this before."""
        return get_hash_for_files((__file__,))


def _products(term: fx.Node) -> list[fx.Node] | None:
    """The products that a sum is made of, through views; None where it has anything else."""
    if term.target is _aten.mm.default:
        return [term]
    is_sum = term.target is _aten.add.Tensor and not term.kwargs
    if not is_sum and term.target not in _VIEWS:
        return None
    products = list[fx.Node]()
    for each in term.args if is_sum else term.args[:1]:
        within = _products(each) if isinstance(each, fx.Node) and len(each.users) == 1 else None
        if within is None or (is_sum and _kind(each) != _kind(term)):
            return None
        products += within
    return products


def _kind(node: Any) -> tuple[Any, ...]:
    """Shape and precision of what a node makes."""
    value = node.meta["val"]
    return (*value.shape, value.dtype)


def _replace(graph: fx.Graph, node: fx.Node, products: list[fx.Node]) -> None:
    with graph.inserting_before(node):
        lefts, rights = ([each.args[side] for each in products] for side in (0, 1))
        total = graph.call_function(torch.ops.spotune.sum_of_products.default, (lefts, rights))
        total.meta["val"] = products[0].meta["val"]
        viewed = graph.call_function(_aten.view.default, (total, list(node.meta["val"].shape)))
        viewed.meta = dict(node.meta)
    node.replace_all_uses_with(viewed)
    graph.erase_node(node)


@torch.library.custom_op("spotune::sum_of_products", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def sum_of_products(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """lefts[0] @ rights[0] + lefts[1] @ rights[1] + ..., each rounded to their precision as it is added."""
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        torch.addmm(total, left, right, out=total)
    return total


@sum_of_products.register_fake
def _(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1])
