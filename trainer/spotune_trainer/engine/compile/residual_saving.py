"""Residual saving: a torch.compile pass that chooses which tensor of a residual connection is kept for backward.

A residual connection computes `sum = stream + product`, and the norm after it needs the sum for its gradient. The
compiler may save the product instead, since it saves the stream in any case, and add the two again wherever the sum is
read, even in the forward pass. Each of those kernels then reads two tensors instead of one. Since they also share the
stream, the weight gradients of one norm are computed together with the input gradient of another norm, instead of with
that of the same norm.

The sum is as large as the product, so saving the sum instead costs no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

import spotune_trainer.engine.compile.gradient_accumulation_fusion  # noqa: F401, registers spotune::linear

_aten = torch.ops.aten
_PRODUCTS = (
    torch.ops.spotune.linear.default,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,  # of FP8
)


class SaveResidualSums(CustomGraphPass):
    """Makes the compiler save residual sums; runs on the joint graph of a layer's forward and backward pass."""

    def __call__(self, graph: fx.Graph) -> None:
        """Mark each residual sum as never to be recomputed."""
        for node in graph.nodes:
            terms = node.all_input_nodes if node.target is _aten.add.Tensor else []
            have_equal_size = len(terms) == 2 and len(set(map(_bytes, [node, *terms]))) == 1
            if have_equal_size and any(_is_freed_by_saving(node, term) for term in terms):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """Key of this pass in torch.compile's cache: it changes with this file."""
        return get_hash_for_files((__file__,))


def _is_freed_by_saving(total: fx.Node, node: fx.Node) -> bool:
    """Whether a node need not be saved once the sum is.

    It is a product as large as the sum, or computed from one, and nothing else uses it. Then no gradient needs the
    product or anything between it and the sum.
    """
    if len(node.users) != 1:
        return False
    if node.target in _PRODUCTS:
        return _bytes(node) == _bytes(total)
    return any(_is_freed_by_saving(total, term) for term in node.all_input_nodes)


def _bytes(node: fx.Node) -> int | None:
    """Size of the tensor that a node computes; None if it computes something else."""
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else None
