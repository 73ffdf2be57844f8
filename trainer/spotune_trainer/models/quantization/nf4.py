"""NF4: frozen weight matrices in 4 bits an element, as in QLoRA (Dettmers et al. 2023, section 3).

A matrix is cut into blocks of 64 elements, and each is divided by its largest magnitude, its absmax. An element's code
is that of the nearest of the 16 numbers of NormalFloat, which are quantiles of the normal distribution (appendix E). A
layer dequantizes its matrix in each forward pass and again in each backward pass, so that only one whole matrix is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from spotune.errors import JobError
from spotune_trainer.models.quantization.blockwise import midpoints_between, normalize_blocks, split_into_blocks

BLOCK_ELEMENTS = 64
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_CHUNK_ELEMENTS = 1 << 24
"""Elements that are dequantized at once, whole blocks. It takes about 128 MiB of temporary memory."""


class Linear4bit(nn.Linear):
    """A frozen linear layer whose matrix is kept in 4 bits.

    `weight` is empty: its dtype tells other code the dtype of the activations. Codes and absmax are integer buffers,
    because DeepSpeed casts floating-point buffers when it casts a model.

    Args:
        layer: the layer to quantize; its bias is shared. On the meta device it gets its matrix later, by `keep`.

    Attributes:
        codes: see `quantize`.
        absmax_bits: the bits of the fp32 absmax of each block, int32 [blocks].
    """

    codes: Tensor
    absmax_bits: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        if layer.weight.is_meta:
            self.weight = layer.weight
        else:
            self.keep(*quantize(layer.weight.detach()), layer.weight.dtype)

    def keep(self, codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> None:
        """Take a matrix that `quantize` has quantized; `dtype` is that of activations."""
        self._parameters.pop("weight", None)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("absmax_bits", absmax.view(torch.int32), persistent=False)
        self.register_buffer("weight", codes.new_empty(0, dtype=dtype), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch.nn.Linear
        """[..., in] to [..., out]."""
        shape = (self.out_features, self.in_features)
        output: Tensor = _FrozenLinear.apply(input, self.codes, self.absmax_bits, self.bias, shape)
        return output


class _FrozenLinear(torch.autograd.Function):
    """A linear map that saves codes and absmax for the backward pass, not the matrix."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, codes: Tensor, absmax_bits: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        context.save_for_backward(codes, absmax_bits)
        context.shape = shape
        return F.linear(inputs, dequantize(codes, absmax_bits.view(torch.float32), shape, inputs.dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, absmax_bits = context.saved_tensors
        [gradient] = gradients
        matrix = dequantize(codes, absmax_bits.view(torch.float32), context.shape, gradient.dtype)
        return gradient @ matrix, None, None, None, None


def is_quantized(model: nn.Module) -> bool:
    """Whether layers of a model are quantized."""
    return any(isinstance(module, Linear4bit) for module in model.modules())


def quantize_layers(model: PreTrainedModel, kept: Sequence[str] = ()) -> None:
    """Replace all linear layers of the model, except the output projection, by `Linear4bit`.

    Args:
        model: The model.
        kept: Names of modules whose layers stay as they are.

    Raises:
        JobError: the model has no linear layers.
    """
    output_projection = model.get_output_embeddings()
    excluded = tuple(f"{name}." for name in kept)
    linear = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer is not output_projection and not f"{name}.".startswith(excluded)
    ]
    if not linear:
        raise JobError(
            "adapter.quantization: nf4 needs layers of type torch.nn.Linear, and model.source has none: use none"
        )
    for name, layer in linear:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Linear4bit(layer))


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of any shape, in the order of its flattened elements; the last block is padded with zeros.

    Returns:
        Codes, uint8 [blocks * BLOCK_ELEMENTS / 2]: two in a byte, the first one in its upper four bits. And the absmax
        of the blocks, fp32 [blocks].
    """
    midpoints = midpoints_between(torch.tensor(NF4_VALUES, device=values.device))
    normalized, absmax = normalize_blocks(split_into_blocks(values.flatten(), BLOCK_ELEMENTS).float())
    codes = torch.bucketize(normalized, midpoints, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], absmax


def dequantize(codes: Tensor, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix of this shape from which `quantize` computed codes and absmax."""
    elements = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
    values_of_byte, chunk_bytes = _values_of_byte(codes.device), _CHUNK_ELEMENTS // 2
    for start in range(0, codes.numel(), chunk_bytes):
        chunk = codes[start : start + chunk_bytes]
        blocks = values_of_byte[chunk.int()].view(-1, BLOCK_ELEMENTS)
        first = 2 * start // BLOCK_ELEMENTS
        blocks *= absmax[first : first + len(blocks), None]
        elements[2 * start : 2 * (start + len(chunk))] = blocks.view(-1)
    return elements[: shape[0] * shape[1]].view(shape)


@cache
def _values_of_byte(device: torch.device) -> Tensor:
    """The two numbers that each byte of codes stands for, fp32 [256, 2]."""
    values = torch.tensor(NF4_VALUES, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
