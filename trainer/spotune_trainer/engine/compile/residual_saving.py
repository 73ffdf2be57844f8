"""Which of two equally large tensors of a residual connection compiled layers keep for the backward pass.

Of `sum = stream + product` the norm that follows needs the sum for its gradient. The compiler may as well keep the
product, as the stream is an input that is kept anyway, and add the two again wherever the sum is read, in the forward
pass, too. Each of those kernels then reads two tensors instead of one; and as they share the stream, the gradients of
one norm's weights are computed with those of another norm's input, instead of each with its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

import spotune_trainer.engine.compile.gradient_accumulation_fusion  # noqa: F401, registers the products

_aten = torch.ops.aten
_PRODUCTS = (torch.ops.spotune.linear.default, _aten.mm.default, _aten.addmm.default)


class KeepResidualSums(CustomGraphPass):
    """Has them keep the sum; a pass of torch.compile over the forward and backward pass of a layer as one graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Mark sums that are never to be computed again."""
        for node in graph.nodes:
            terms = node.all_input_nodes if node.target is _aten.add.Tensor else []
            are_alike = len(terms) == 2 and len(set(map(_bytes, [node, *terms]))) == 1
            if are_alike and any(_is_replaced(term, node) for term in terms):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """By which the compiler knows whether it has compiled with this before."""
        return get_hash_for_files((__file__,))


def _is_replaced(node: fx.Node, total: fx.Node) -> bool:
    """Whether this is, or is made of, a product as large as the sum that is used for nothing else.

    No gradient needs it then, nor what is between the two, so that keeping the sum takes no more memory.
    """
    if len(node.users) != 1:
        return False
    if node.target in _PRODUCTS:
        return _bytes(node) == _bytes(total)
    return any(_is_replaced(term, total) for term in node.all_input_nodes)


def _bytes(node: fx.Node) -> int | None:
    """Of what a node makes; None where it is no tensor."""
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else None
