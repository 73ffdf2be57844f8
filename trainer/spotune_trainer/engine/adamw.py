"""AdamW as a job asks for it: PyTorch's, or one with block-wise moments in 8 bits an element (docs/adr/0022).

DeepSpeed lays many parameters one behind the other and has the optimizer step them as one tensor. Blocks of the 8-bit
moments do not go across from one parameter to the next, whose gradients may be of another size: where the second
moment of an element is read as zero beside much larger ones, Adam divides by nothing but its epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spotune.job import TrainingSpec
from spotune_trainer.models.blockwise_quantization import (
    BLOCK_ELEMENTS,
    PIECE_ELEMENTS,
    Blocks,
    Blockwise,
    Levels,
    dequantise,
    dynamic_levels,
    in_blocks,
    nearest_levels,
)

SMALLEST_8BIT = 4096
"""Parameters of fewer elements keep fp32 moments, as in bitsandbytes: there is nothing to save."""
_MOST_INDEXED = 1 << 30
"""Elements that a compiled update is given at once: it counts in 32 bits."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: PreTrainedModel, training: TrainingSpec, *, compiled: bool) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: neither biases (T5's relative ones included) nor norms.

    `compiled` is for 8-bit moments; others are updated by PyTorch's fused kernel.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [p for name, p in trainable if p.ndim >= 2 and "bias" not in name]
    others = [p for name, p in trainable if p.ndim < 2 or "bias" in name]
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    given = [group for group in groups if group["params"]]
    if training.optimizer == "adamw8bit":
        return AdamW8bit(given, settings, compiled=compiled)
    return torch.optim.AdamW(given, fused=True, **settings)


@dataclass
class Moments:
    """Adam's two moments of a run of one parameter's elements, within a tensor that is stepped as one.

    Attributes:
        start: first element within that tensor.
        length: number of elements.
        states: both moments by their names, block-wise or in fp32.
        restored: what has been read of a checkpoint for those that are block-wise, in host memory.
    """

    start: int
    length: int
    states: Mapping[str, Blockwise | Tensor]
    restored: dict[str, Tensor] = field(default_factory=dict)

    def to_restore(self) -> Mapping[str, Tensor]:
        """fp32 tensors that take what a checkpoint holds; `adopt` makes it the moments' own."""
        for name, state in self.states.items():
            if isinstance(state, Blockwise) and name not in self.restored:
                self.restored[name] = torch.empty(self.length)
        return {name: state for name, state in self.states.items() if isinstance(state, Tensor)} | self.restored

    def adopt(self) -> None:
        """Quantise what has been restored, and let go of it."""
        for name, values in self.restored.items():
            state = self.states[name]
            assert isinstance(state, Blockwise)
            state.write(0, values)
        self.restored.clear()


class AdamW8bit(torch.optim.Optimizer):
    """AdamW, its moments block-wise in 8 bits between two steps; the arithmetic is in fp32.

    Args:
        groups: as any optimizer's.
        settings: lr, betas and eps.
        compiled: an update is one kernel; else it is many, over some of the elements after the others.
    """

    found_inf: Tensor | None = None
    """Not zero: no step is taken, as PyTorch's fused optimizers have it."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any], *, compiled: bool = False) -> None:
        super().__init__(groups, dict(settings) | {"weight_decay": 0.0})
        self._levels: dict[torch.device, Mapping[str, Levels]] = {}
        self._update = _compiled_update() if compiled else _update_blocks
        self._at_once = _MOST_INDEXED if compiled else PIECE_ELEMENTS

    def moments(self, tensor: Tensor, start: int, length: int, parameter_elements: int) -> Moments:
        """The moments of a run of a parameter with so many elements in all; zeros when first asked for.

        Before the first step all runs of a tensor have to be asked for: what lies between them is not updated.
        """
        runs: dict[int, Moments] = self._state(tensor)["runs"]
        if start not in runs:
            runs[start] = Moments(start, length, self._zeros(tensor.device, length, parameter_elements))
        return runs[start]

    def adopt(self) -> None:
        """Make what has been restored the moments of all runs."""
        for state in self.state.values():
            for run in state["runs"].values():
                run.adopt()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self.update(group, tensor, [(0, tensor.grad.contiguous().view(-1))], torch.ones(()))

    @torch.no_grad()
    def update(
        self, group: Mapping[str, Any], tensor: Tensor, gradients: Iterable[tuple[int, Tensor]], clip: Tensor
    ) -> None:
        """Update a tensor run by run.

        Args:
            group: whose settings are taken.
            tensor: one of its `params`.
            gradients: in any precision, in one dimension, with the place of their first element in the tensor; of every
                run, in order, one has all of it.
            clip: what they are multiplied by.
        """
        state = self._state(tensor)
        is_left_out = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
        state["step"] += is_left_out == 0
        factors = _factors(group, state["step"], clip, is_left_out)
        values, placed = tensor.detach().view(-1), iter(gradients)
        start, gradient = next(placed)
        for _, run in sorted(state["runs"].items()):
            while run.start >= start + gradient.numel():
                start, gradient = next(placed)
            slopes = gradient[run.start - start :][: run.length]
            self._step(values[run.start :][: run.length], slopes, run, factors)

    def _step(self, values: Tensor, gradient: Tensor, run: Moments, factors: Tensor) -> None:
        """One step of a run."""
        first, second = (run.states[name] for name in MOMENTS)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            _replace((values, first, second), _adamw(values, gradient, first, second, factors), factors)
            return
        assert isinstance(first, Blockwise)
        assert isinstance(second, Blockwise)
        whole = run.length - run.length % BLOCK_ELEMENTS
        for start in range(0, whole, self._at_once):
            end = min(start + self._at_once, whole)
            here, slopes = values[start:end].view(-1, BLOCK_ELEMENTS), gradient[start:end].view(-1, BLOCK_ELEMENTS)
            self._update(here, slopes, first.blocks(start, end), second.blocks(start, end), factors)
        if whole < run.length:  # the last block is filled up, in a copy
            padded, slopes = in_blocks(values[whole:], BLOCK_ELEMENTS), in_blocks(gradient[whole:], BLOCK_ELEMENTS)
            _update_blocks(padded, slopes, first.blocks(whole, run.length), second.blocks(whole, run.length), factors)
            values[whole:] = padded.view(-1)[: run.length - whole]

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        """Of a tensor: the steps taken, where it lies, and the moments of its runs by their first element."""
        if not self.state[tensor]:
            self.state[tensor] = {"step": torch.zeros((), device=tensor.device), "runs": {}}
        state: dict[str, Any] = self.state[tensor]
        return state

    def _zeros(self, device: torch.device, length: int, parameter_elements: int) -> dict[str, Blockwise | Tensor]:
        if parameter_elements < SMALLEST_8BIT:
            return {name: torch.zeros(length, device=device) for name in MOMENTS}
        if device not in self._levels:
            self._levels[device] = {name: dynamic_levels(signed=name == "exp_avg", device=device) for name in MOMENTS}
        return {name: Blockwise(length, levels) for name, levels in self._levels[device].items()}


def _factors(group: Mapping[str, Any], step: Tensor, clip: Tensor, is_left_out: Tensor) -> Tensor:
    """What a step's arithmetic takes besides tensors of elements, fp32 [8]: made on the device, no host waits."""
    rate, (beta1, beta2), count = group["lr"], group["betas"], step.double()
    found = (
        1 - rate * group["weight_decay"],
        -rate / (1 - beta1**count),
        (1 - beta2**count).sqrt(),
        beta1,
        beta2,
        group["eps"],
        clip,
        is_left_out,
    )
    return torch.stack([torch.zeros_like(step) + each for each in found])


def _update_blocks(values: Tensor, gradient: Tensor, first: Blocks, second: Blocks, factors: Tensor) -> None:
    """One step of whole blocks [blocks, elements of a block], in place."""
    updated, *moments = _adamw(values, gradient, dequantise(first), dequantise(second), factors)
    _replace([values], [updated], factors)
    for blocks, moment in zip((first, second), moments, strict=True):
        _replace((blocks.codes, blocks.scales), nearest_levels(moment, blocks.levels), factors)


def _compiled_update() -> Callable[..., None]:
    """`_update_blocks` as one kernel for any number of blocks, which are of a fixed length."""
    compiled = torch.compile(_update_blocks)

    def update(values: Tensor, gradient: Tensor, first: Blocks, second: Blocks, factors: Tensor) -> None:
        for each in (values, gradient, first.codes, first.scales, second.codes, second.scales):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        compiled(values, gradient, first, second, factors)

    return update


def _adamw(
    values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2: values and both moments after a step."""
    decay, rate, root, beta1, beta2, epsilon, clip, _ = factors.unbind()
    gradient = gradient.float() * clip
    first = torch.lerp(gradient, first, beta1)
    second = torch.lerp(gradient.square(), second, beta2)
    return values * decay + rate * first / (second.sqrt() / root + epsilon), first, second


def _replace(old: Sequence[Tensor], new: Sequence[Tensor], factors: Tensor) -> None:
    """Take what is new, unless the step is left out."""
    is_left_out = factors[-1] != 0
    for before, after in zip(old, new, strict=True):
        before.copy_(torch.where(is_left_out, before, after))
