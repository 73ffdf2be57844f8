"""What optimizers need to step DeepSpeed's masters: slices of parameters, and steps that skip themselves.

DeepSpeed concatenates parameters into a few flat master tensors, cuts these into partitions, and gives the optimizer
the partition of its rank. So an optimizer does not see parameters but slices of masters. Without ZeRO each parameter is
its own master.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Gradients = Iterable[tuple[int, Tensor]]
"""(offset in the master, gradient) pairs in ascending order. A gradient has one dimension and any precision."""


@dataclass(frozen=True)
class MasterSlice:
    """Where a rank holds a range of one parameter's elements.

    Attributes:
        parameter: its name.
        shape: of the whole parameter.
        offset: first element of the range within the parameter.
        master: tensor that the optimizer steps; it holds this range and those of other parameters.
        start: first element of the range within the master.
        length: number of elements of the range.
    """

    parameter: str
    shape: tuple[int, ...]
    offset: int
    master: Tensor
    start: int
    length: int

    @property
    def parameter_elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the range is the whole parameter."""
        return self.length == self.parameter_elements

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of the master, or of a tensor shaped like it; a view in one dimension."""
        return tensor.view(-1).narrow(0, self.start, self.length)

    def cut(self, whole: Tensor) -> Tensor:
        """These elements of a tensor shaped like the parameter, in one dimension."""
        return whole.reshape(-1)[self.offset : self.offset + self.length]


class MasterOptimizer(torch.optim.Optimizer):
    """An optimizer that updates a master from gradients wherever they are, and skips a step on the device.

    `state[master]["step"]` is the number of steps taken, a scalar on the master's device.

    Args:
        groups: parameter groups, as for any optimizer.
        settings: default values of the groups' settings.
    """

    found_inf: Tensor | None = None
    """If not zero, the step is skipped; the same convention as PyTorch's fused optimizers."""

    def __init__(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **settings})

    def add_slice(self, piece: MasterSlice) -> None:
        """Announce a slice. All must be announced before the first step; again is harmless."""
        self.create_state(piece.master)

    def create_state(self, master: Tensor) -> dict[str, Any]:
        """The state of a master; created at the first call."""
        if not self.state[master]:
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            self.state[master] = {"step": step, **self._initial_state(master)}
        state: dict[str, Any] = self.state[master]
        return state

    @abstractmethod
    def _initial_state(self, master: Tensor) -> dict[str, Any]:
        """State of a master before its first step, without its step count."""

    @abstractmethod
    def elementwise_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """Views of the states of a slice that have an element for each of its elements, for checkpoints."""

    def whole_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """Views in one dimension of states of another size. All ranks with a slice of the parameter hold the same."""
        return {}

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of scalars in the state of each master, besides `step`, that a checkpoint must contain."""
        return ()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    clip = torch.ones((), device=master.device)
                    self.update(group, master, [(0, master.grad.contiguous().view(-1))], clip)

    @abstractmethod
    def update(self, group: Mapping[str, Any], master: Tensor, gradients: Gradients, clip: Tensor) -> None:
        """Update one master.

        Args:
            group: the parameter group that it belongs to, for its settings.
            master: to be updated.
            gradients: of its elements; each slice lies within one of them.
            clip: scalar that gradients are multiplied by.
        """

    def count_step(self, master: Tensor) -> tuple[Tensor, Tensor]:
        """Count a step of a master unless it is skipped.

        Returns:
            The step count after it, at least 1, fp64; and whether it is skipped. Both are scalars on the device.
        """
        step = self.create_state(master)["step"]
        found = torch.zeros_like(step) if self.found_inf is None else self.found_inf
        is_skipped = found.to(step.device) != 0
        step += (~is_skipped).to(step.dtype)
        return step.double().clamp(min=1), is_skipped


def write_unless(is_skipped: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy the new tensors to the old ones, unless the step is skipped; decided on the device."""
    for before, after in zip(old, new, strict=True):
        before.copy_(torch.where(is_skipped, before, after))
