"""Frozen weight matrices in 4 bits an element (QLoRA: Dettmers et al. 2023, section 3).

Every block of 64 elements is divided by its largest magnitude, and the quotients become the nearest of the 16 levels of
NormalFloat, quantiles of the normal distribution (appendix E). A layer makes its matrix of them whenever it computes,
and again in the backward pass, so that one matrix at a time is whole.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from spotune.errors import JobError
from spotune_trainer.models.blockwise_quantization import in_blocks, midpoints, scaled

BLOCK_ELEMENTS = 64
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_PIECE_ELEMENTS = 1 << 24
"""Made of their codes at once, whole blocks; that takes some 128 MiB meanwhile."""


class Linear4bit(nn.Linear):
    """A linear layer whose matrix is kept in 4 bits; `weight` is empty and has but the dtype of the activations.

    Its buffers have integers alone, which DeepSpeed leaves as they are when it casts a model.

    Args:
        layer: what it takes the place of.
    """

    codes: Tensor
    scale_bits: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        codes, scales = quantise(layer.weight.detach())
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale_bits", scales.view(torch.int32), persistent=False)
        self.register_buffer("weight", layer.weight.detach().new_empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - so it is called in torch
        """[..., in] to [..., out]."""
        shape = (self.out_features, self.in_features)
        found: Tensor = _Linear.apply(input, self.codes, self.scale_bits, self.bias, shape)
        return found


class _Linear(torch.autograd.Function):
    """A linear layer that is frozen; its backward pass keeps codes and scales, not the matrix."""

    @staticmethod
    def forward(
        context: Any, given: Tensor, codes: Tensor, scale_bits: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        context.save_for_backward(codes, scale_bits)
        context.shape = shape
        return F.linear(given, dequantise(codes, scale_bits.view(torch.float32), shape, given.dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scale_bits = context.saved_tensors
        [gradient] = gradients
        matrix = dequantise(codes, scale_bits.view(torch.float32), context.shape, gradient.dtype)
        return gradient @ matrix, None, None, None, None


def quantise_layers(model: PreTrainedModel) -> None:
    """Put layers of 4 bits in the place of the model's linear layers, but for the one that makes the logits.

    Raises:
        JobError: the model has none.
    """
    logits = model.get_output_embeddings()
    linear = [
        (name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not logits
    ]
    if not linear:
        raise JobError(
            "adapter.quantization: the layers of model.source are of a kind that nf4 does not know: use none"
        )
    for name, layer in linear:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Linear4bit(layer))


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of all elements, two in a byte, the first one in its upper half, and scales of all blocks, fp32."""
    levels = torch.tensor(LEVELS, device=values.device)
    quotients, scales = scaled(in_blocks(values.flatten(), BLOCK_ELEMENTS).float())
    codes = torch.bucketize(quotients, midpoints(levels), out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor of what `quantise` made of one of that shape."""
    found = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
    pairs, half = _pairs(codes.device), _PIECE_ELEMENTS // 2
    for start in range(0, codes.numel(), half):
        part = codes[start : start + half]
        blocks = pairs[part.int()].view(-1, BLOCK_ELEMENTS)
        first = 2 * start // BLOCK_ELEMENTS
        blocks *= scales[first : first + len(blocks), None]
        found[2 * start : 2 * (start + len(part))] = blocks.view(-1)
    return found[: shape[0] * shape[1]].view(shape)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Both levels of every byte [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
