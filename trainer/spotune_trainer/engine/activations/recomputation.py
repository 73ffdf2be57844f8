"""Selective recomputation: the backward pass computes some layers again, but not their attention.

Korthikanti et al. (2022), section 5: the parts of a layer differ in how much computation a byte of memory saves. In
rows of T tokens through a model of width h, an element of attention's output takes about T multiplications, and one of
a projection's output h. So a recomputed layer keeps its input and the output of its attention (with the logarithms of
the softmax denominators), and computes all other tensors from these two. If layers are compiled, what no gradient
needs, such as the layer's last projection, is not computed again. If they are not, looking at each operator costs time
on the host, and attention is kept only in rows of T >= 4 h.

The last layers of a model are kept whole, as many as the plan has memory for. The backward pass frees them first, and a
layer that is computed again then uses their memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.varlen  # registers the operator
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_aten = torch.ops.aten
ATTENTION_OPERATORS = frozenset(
    {
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Fused attention: these save their output and the logarithm of each row's softmax denominator."""


class RecomputeLayer(CustomGraphPass):
    """Makes the compiler recompute a layer; runs on the joint graph of its forward and backward pass.

    It runs after the compiler has replaced random operators by generators with a seed. The seed is saved, so that the
    backward pass makes the same dropout masks again.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Mark each operator of the forward pass as one to save or one to recompute."""
        in_backward = set[fx.Node]()
        for node in graph.nodes:
            is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
            if is_tangent or not in_backward.isdisjoint(node.all_input_nodes):
                in_backward.add(node)
            elif node.op == "call_function":
                _set_policy(node)

    def uuid(self) -> Any:
        """Key of this pass in torch.compile's cache: it changes with this file."""
        return get_hash_for_files((__file__,))


def _set_policy(node: fx.Node) -> None:
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node), "only results of operators are indexed"
    if source.target in ATTENTION_OPERATORS:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    elif not _draws_seed(source):  # seeds are saved in any case
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0  # all nodes belong to one recomputed region


def recompute_layers(model: PreTrainedModel, kept: Sequence[nn.Module], *, saves_attention: bool) -> None:
    """Recompute the layers of a model that is not compiled, except those that are `kept` whole.

    Args:
        model: gets transformers' gradient checkpointing.
        kept: some of its layers.
        saves_attention: whether recomputed layers keep the output of attention.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if saves_attention:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for layer in kept:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def _policy(_context: Any, target: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if target in ATTENTION_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _draws_seed(node: fx.Node) -> bool:
    """Whether a node takes random numbers from PyTorch's generator. `inductor_random` takes them from a seed."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and node.target is not torch.ops.prims.inductor_random.default
