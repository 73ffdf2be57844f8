"""AdamW with moments in 8-bit blocks (docs/adr/0022).

DeepSpeed concatenates many parameters into one master tensor, and the optimizer steps that. An 8-bit block must not
span two parameters, because their gradients may differ by orders of magnitude. A small second moment in a block with
much larger ones would be quantized to zero, and Adam would divide by its epsilon alone. `AdamW8bit` therefore keeps the
moments of each parameter's slice of a master in blocks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.engine.host_states.stream import StateStream
from spotune_trainer.models.quantization.blockwise import (
    BLOCK_ELEMENTS,
    CHUNK_ELEMENTS,
    BlockwiseTensor,
    QuantizationMap,
    QuantizedBlocks,
    dequantize,
    dynamic_quantization_map,
    quantize_blocks,
    split_into_blocks,
)

MIN_8BIT_ELEMENTS = 4096
"""Parameters of fewer elements keep fp32 moments, as in bitsandbytes: 8-bit moments would save next to nothing."""
_MAX_COMPILED_ELEMENTS = 1 << 30
"""Most elements of one compiled update: its kernel has 32-bit indices."""
_SMALLEST_ON_HOST = 1 << 18
"""Slices of fewer elements keep their moments on the device: copies have a latency, and these need little memory."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, by PyTorch's names."""


@dataclass
class Moments:
    """Adam's two moments of one slice of a master tensor; the slice belongs to one parameter.

    Attributes:
        start: first element of the slice within the master.
        length: number of elements.
        states: both moments by name, as 8-bit blocks, or in fp32 for small parameters.
        loaded: fp32 buffers in host memory that a checkpoint is read into, for moments in 8-bit blocks.
    """

    start: int
    length: int
    states: Mapping[str, BlockwiseTensor | Tensor]
    loaded: dict[str, Tensor] = field(default_factory=dict)

    def parts(self, elements: slice) -> Iterator[Tensor]:
        """The tensors that hold some elements of both moments, which begin with a block: two, or codes and absmax."""
        for name in MOMENTS:
            state = self.states[name]
            if isinstance(state, Tensor):
                yield state[elements]
            else:
                blocks = state.blocks(elements.start, elements.stop)
                yield from (blocks.codes, blocks.absmax)

    def tensors_to_load(self) -> Mapping[str, Tensor]:
        """fp32 tensors to read a checkpoint into. Call `quantize_loaded` afterwards."""
        for name, state in self.states.items():
            if isinstance(state, BlockwiseTensor) and name not in self.loaded:
                self.loaded[name] = torch.empty(self.length)
        return {name: state for name, state in self.states.items() if isinstance(state, Tensor)} | self.loaded

    def quantize_loaded(self) -> None:
        """Quantize what was read into the buffers, and free them."""
        for name, values in self.loaded.items():
            state = self.states[name]
            assert isinstance(state, BlockwiseTensor)
            state.write(0, values)
        self.loaded.clear()


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are kept in 8-bit blocks between steps; all arithmetic is in fp32.

    Args:
        groups: parameter groups, as for any optimizer.
        settings: lr, betas and eps.
        compiled: update with one compiled kernel. Otherwise several kernels update a chunk of elements at a time.
    """

    found_inf: Tensor | None = None
    """If not zero, the step is skipped; the same convention as PyTorch's fused optimizers."""
    state_stream: StateStream | None = None
    """Moves masters and moments, if these are in host memory."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any], *, compiled: bool = False) -> None:
        super().__init__(groups, dict(settings) | {"weight_decay": 0.0})
        self._maps: dict[torch.device, Mapping[str, QuantizationMap]] = {}
        self._update = _compiled_update() if compiled else _update_blocks
        self._chunk_elements = _MAX_COMPILED_ELEMENTS if compiled else CHUNK_ELEMENTS

    def moments(self, tensor: Tensor, start: int, length: int, parameter_elements: int) -> Moments:
        """The moments of a slice of a master; created as zeros at the first call.

        Every slice of a master must be asked for before the first step: elements in no slice are not updated.

        Args:
            tensor: the master.
            start: first element of the slice.
            length: number of elements of the slice.
            parameter_elements: number of elements of the whole parameter that the slice belongs to.
        """
        slices: dict[int, Moments] = self._state(tensor)["slices"]
        if start not in slices:
            slices[start] = Moments(start, length, self._zeros(self._home(tensor, length), length, parameter_elements))
        return slices[start]

    def quantize_loaded_moments(self) -> None:
        """After a restore: quantize the moments of all slices."""
        for state in self.state.values():
            for moments in state["slices"].values():
                moments.quantize_loaded()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self.update(group, tensor, [(0, tensor.grad.contiguous().view(-1))], torch.ones(()))

    @torch.no_grad()
    def update(
        self,
        group: Mapping[str, Any],
        tensor: Tensor,
        gradients: Iterable[tuple[int, Tensor]],
        clip: Tensor,
        weights: Tensor | None = None,
    ) -> None:
        """Update one master, slice by slice.

        Args:
            group: the parameter group that `tensor` belongs to, for its settings.
            tensor: the master.
            gradients: (offset in the master, gradient) pairs in ascending order. A gradient has one dimension and any
                precision. Each slice lies within one gradient.
            clip: scalar that gradients are multiplied by.
            weights: if not None, the low-precision copy of the master, which is written as well. One dimension.
        """
        state = self._state(tensor)
        is_skipped = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
        state["step"] += is_skipped == 0
        factors = _step_factors(group, state["step"], clip, is_skipped)
        values, with_offsets = tensor.detach().view(-1), iter(gradients)
        offset, gradient = next(with_offsets)
        for _, moments in sorted(state["slices"].items()):
            while moments.start >= offset + gradient.numel():
                offset, gradient = next(with_offsets)
            elements = slice(moments.start, moments.start + moments.length)
            gradient_of_slice = gradient[moments.start - offset :][: moments.length]
            of_weights = None if weights is None else weights[elements]
            self._step_slice(values[elements], gradient_of_slice, moments, factors, of_weights)

    def _step_slice(
        self, values: Tensor, gradient: Tensor, moments: Moments, factors: Tensor, weights: Tensor | None
    ) -> None:
        most_elements = self._chunk_elements if self.state_stream is None else self.state_stream.piece_elements
        for start in range(0, moments.length, most_elements):
            elements = slice(start, min(start + most_elements, moments.length))
            with self._on_device([values[elements], *moments.parts(elements)]) as (piece, *parts):
                self._step_piece(piece, gradient[elements], parts, factors)
                if weights is not None:
                    weights[elements].copy_(piece)

    def _on_device(self, states: list[Tensor]) -> AbstractContextManager[list[Tensor]]:
        return nullcontext(states) if self.state_stream is None else self.state_stream.on_device(states)

    def _step_piece(self, values: Tensor, gradient: Tensor, parts: Sequence[Tensor], factors: Tensor) -> None:
        """One step of a piece of a slice; `parts` are those of `Moments.parts`."""
        if len(parts) == len(MOMENTS):
            first_moment, second_moment = parts
            updated = _adamw(values, gradient, first_moment, second_moment, factors)
            _write_unless_skipped((values, first_moment, second_moment), updated, factors)
            return
        maps, (codes, absmax, second_codes, second_absmax) = self._maps_on(values.device), parts
        first = QuantizedBlocks(codes, absmax, maps["exp_avg"])
        second = QuantizedBlocks(second_codes, second_absmax, maps["exp_avg_sq"])
        in_whole_blocks = values.numel() - values.numel() % BLOCK_ELEMENTS
        blocks = in_whole_blocks // BLOCK_ELEMENTS
        if blocks:
            self._update(
                values[:in_whole_blocks].view(-1, BLOCK_ELEMENTS),
                gradient[:in_whole_blocks].view(-1, BLOCK_ELEMENTS),
                first.cut(0, blocks),
                second.cut(0, blocks),
                factors,
            )
        if in_whole_blocks < values.numel():  # the last block is padded, which copies it
            tail = values[in_whole_blocks:]
            padded = split_into_blocks(tail, BLOCK_ELEMENTS)
            padded_gradient = split_into_blocks(gradient[in_whole_blocks:], BLOCK_ELEMENTS)
            last_blocks = first.cut(blocks, blocks + 1), second.cut(blocks, blocks + 1)
            _update_blocks(padded, padded_gradient, *last_blocks, factors)
            tail.copy_(padded.view(-1)[: tail.numel()])

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        """State of a master: "step", the number of steps taken, and "slices", `Moments` by their first element."""
        if not self.state[tensor]:
            device = tensor.device if self.state_stream is None else self.state_stream.device
            self.state[tensor] = {"step": torch.zeros((), device=device), "slices": {}}
        state: dict[str, Any] = self.state[tensor]
        return state

    def _home(self, tensor: Tensor, length: int) -> torch.device:
        """Where moments of a slice of a master are kept."""
        if self.state_stream is not None and length < _SMALLEST_ON_HOST:
            return self.state_stream.device
        return tensor.device

    def _zeros(self, device: torch.device, length: int, parameter_elements: int) -> dict[str, BlockwiseTensor | Tensor]:
        if parameter_elements < MIN_8BIT_ELEMENTS:
            return {name: torch.zeros(length, device=device) for name in MOMENTS}
        empty = None if self.state_stream is None or device == self.state_stream.device else self.state_stream.empty
        maps = self._maps_on(device)
        return {name: BlockwiseTensor(length, maps[name], empty) for name in MOMENTS}

    def _maps_on(self, device: torch.device) -> Mapping[str, QuantizationMap]:
        if device not in self._maps:
            self._maps[device] = {
                name: dynamic_quantization_map(signed=name == "exp_avg", device=device) for name in MOMENTS
            }
        return self._maps[device]


def _step_factors(group: Mapping[str, Any], step: Tensor, clip: Tensor, is_skipped: Tensor) -> Tensor:
    """The scalars of a step, fp32 [8], in the order in which `_adamw` unpacks them.

    They are computed on the device, because the step count and `is_skipped` are there: the host does not wait.
    """
    rate, (beta1, beta2), count = group["lr"], group["betas"], step.double()
    factors = (
        1 - rate * group["weight_decay"],  # decoupled weight decay
        -rate / (1 - beta1**count),  # learning rate with the bias correction of the first moment
        (1 - beta2**count).sqrt(),  # bias correction of the second moment
        beta1,
        beta2,
        group["eps"],
        clip,
        is_skipped,
    )
    return torch.stack([torch.zeros_like(step) + each for each in factors])


def _update_blocks(
    values: Tensor, gradient: Tensor, first: QuantizedBlocks, second: QuantizedBlocks, factors: Tensor
) -> None:
    """One step of whole blocks [blocks, BLOCK_ELEMENTS], in place: dequantize, update, quantize."""
    updated, *moments = _adamw(values, gradient, dequantize(first), dequantize(second), factors)
    _write_unless_skipped([values], [updated], factors)
    for blocks, moment in zip((first, second), moments, strict=True):
        _write_unless_skipped((blocks.codes, blocks.absmax), quantize_blocks(moment, blocks.quantization_map), factors)


def _compiled_update() -> Callable[..., None]:
    """`_update_blocks` as one compiled kernel, for any number of blocks."""
    compiled = torch.compile(_update_blocks)

    def update(
        values: Tensor, gradient: Tensor, first: QuantizedBlocks, second: QuantizedBlocks, factors: Tensor
    ) -> None:
        for each in (values, gradient, first.codes, first.absmax, second.codes, second.absmax):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        compiled(values, gradient, first, second, factors)

    return update


def _adamw(
    values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Values and both moments after a step (Loshchilov and Hutter 2019, algorithm 2)."""
    decay, rate, correction, beta1, beta2, epsilon, clip, _ = factors.unbind()
    gradient = gradient.float() * clip
    first = torch.lerp(gradient, first, beta1)
    second = torch.lerp(gradient.square(), second, beta2)
    return values * decay + rate * first / (second.sqrt() / correction + epsilon), first, second


def _write_unless_skipped(old: Sequence[Tensor], new: Sequence[Tensor], factors: Tensor) -> None:
    """Copy the new tensors to the old ones, unless the step is skipped; decided on the device."""
    is_skipped = factors[-1] != 0
    for before, after in zip(old, new, strict=True):
        before.copy_(torch.where(is_skipped, before, after))
