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

import spotune_trainer.weight_gradients  # noqa: F401, registers the products

_aten = torch.ops.aten
_PRODUCTS = (torch.ops.spotune.linear.default, _aten.mm.default, _aten.addmm.default)


class KeepResidualSums(CustomGraphPass):
    """Has them keep the sum; a pass of torch.compile over the forward and backward pass of a layer as one graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Mark sums that are never to be computed again."""
        for node in graph.nodes:
            is_sum = node.target is _aten.add.Tensor and _shapes(node) == {node.meta["val"].shape}
            if is_sum and any(map(_leads_here_only, node.all_input_nodes)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """By which the compiler knows whether it has compiled with this before."""
        return get_hash_for_files((__file__,))


def _shapes(node: fx.Node) -> set[torch.Size]:
    return {term.meta["val"].shape for term in node.all_input_nodes}


def _leads_here_only(node: fx.Node) -> bool:
    """Whether a product is used for nothing but this node, and this once: then no gradient needs either of them."""
    return len(node.users) == 1 and (node.target in _PRODUCTS or any(map(_leads_here_only, node.all_input_nodes)))
