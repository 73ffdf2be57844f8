"""AdamW as a job asks for it: PyTorch's, or one with block-wise moments in 8 bits an element (docs/adr/0022).

DeepSpeed lays many parameters one behind the other and has the optimizer step them as one tensor. Blocks of the 8-bit
moments do not go across from one parameter to the next, whose gradients may be of another size: where the second
moment of an element is read as zero beside much larger ones, Adam divides by nothing but its epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spotune.job import TrainingSpec
from spotune_trainer.blockwise import Blockwise, dynamic_levels

SMALLEST_8BIT = 4096
"""Parameters of fewer elements keep fp32 moments, as in bitsandbytes: there is nothing to save."""
_PIECE_ELEMENTS = 1 << 22
"""Updated at once, whole blocks."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: PreTrainedModel, training: TrainingSpec) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: neither biases (T5's relative ones included) nor norms."""
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
        return AdamW8bit(given, settings)
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
    """

    found_inf: Tensor | None = None
    """Not zero: no step is taken. As PyTorch's fused optimizers have it; here the host waits to know."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        super().__init__(groups, dict(settings) | {"weight_decay": 0.0})
        self._levels: dict[torch.device, Mapping[str, Tensor]] = {}

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
        """Update every tensor that has a gradient, run by run."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self._state(tensor)
                    state["step"] += 1
                    for run in state["runs"].values():
                        _update(tensor, run, group, int(state["step"]))

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        """Of a tensor: the steps taken, on the host, and the moments of its runs by their first element."""
        if not self.state[tensor]:
            self.state[tensor] = {"step": torch.zeros((), device="cpu"), "runs": {}}
        state: dict[str, Any] = self.state[tensor]
        return state

    def _zeros(self, device: torch.device, length: int, parameter_elements: int) -> dict[str, Blockwise | Tensor]:
        if parameter_elements < SMALLEST_8BIT:
            return {name: torch.zeros(length, device=device) for name in MOMENTS}
        if device not in self._levels:
            self._levels[device] = {name: dynamic_levels(signed=name == "exp_avg", device=device) for name in MOMENTS}
        return {name: Blockwise(length, levels) for name, levels in self._levels[device].items()}


def _update(tensor: Tensor, run: Moments, group: Mapping[str, Any], step: int) -> None:
    """One step of a run, some of its elements after the others, so that what is made meanwhile is small."""
    gradient = tensor.grad.contiguous() if tensor.grad is not None else None
    assert gradient is not None
    for start in range(0, run.length, _PIECE_ELEMENTS):
        end = min(start + _PIECE_ELEMENTS, run.length)
        values, slope = (each.view(-1)[run.start + start : run.start + end] for each in (tensor.detach(), gradient))
        first, second = (_opened(run.states[name], start, end) for name in MOMENTS)
        _adamw(values, slope, first, second, group, step)
        for name, updated in zip(MOMENTS, (first, second), strict=True):
            state = run.states[name]
            if isinstance(state, Blockwise):
                state.write(start, updated)


def _opened(state: Blockwise | Tensor, start: int, end: int) -> Tensor:
    """Elements of a moment in fp32, to be updated in place."""
    return state.read(start, end) if isinstance(state, Blockwise) else state[start:end]


def _adamw(
    values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, group: Mapping[str, Any], step: int
) -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in place."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    values.mul_(1 - rate * group["weight_decay"])
    values.addcdiv_(first, denominator, value=-rate / (1 - beta1**step))
