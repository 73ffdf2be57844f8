"""Adafactor (Shazeer and Stern 2018, "Adaptive Learning Rates with Sublinear Memory Cost", arXiv:1804.04235).

The second moment of a matrix is kept as one number for each row and one for each column. There is no first moment. A
step is relative to the RMS of the parameter, and the learning rate bounds it. The arithmetic and the default values are
those of torch.optim.Adafactor. That class needs whole parameters, waits for the device three times for each of them,
and cannot skip a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.engine.optimizers.master_optimizer import Gradients, MasterSlice, write_unless
from spotune_trainer.engine.optimizers.whole_parameters import SlicedGradients, WholeParameterOptimizer

_SECOND_MOMENT_POWER = -0.8
"""The decay rate of the second moment is 1 - step^-0.8 (section 7.2)."""
_EPSILON_1 = torch.finfo(torch.float32).eps
_EPSILON_2 = 1e-3
"""Smallest RMS of a parameter that a step is relative to (section 8)."""
_CLIPPING_THRESHOLD = 1.0
"""Largest RMS of an update (section 6)."""


class Adafactor(WholeParameterOptimizer):
    """Adafactor; groups have lr and weight_decay. Each rank with a slice of a parameter keeps its whole state."""

    def _initial_state(self, master: Tensor) -> dict[str, Any]:
        return {"parameters": {}}

    def add_slice(self, piece: MasterSlice) -> None:
        """Announce a slice; see `MasterOptimizer.add_slice`."""
        super().add_slice(piece)
        states: dict[str, dict[str, Tensor]] = self.create_state(piece.master)["parameters"]
        if piece.parameter not in states:
            states[piece.parameter] = {
                name: torch.zeros(shape, device=piece.master.device)
                for name, shape in second_moment_shapes(piece.shape).items()
            }

    def elementwise_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """None: even the second moment of a vector is kept whole."""
        return {}

    def whole_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """The second moment of the whole parameter."""
        states: Mapping[str, Tensor] = self.create_state(piece.master)["parameters"][piece.parameter]
        return {name: state.view(-1) for name, state in states.items()}

    @torch.no_grad()
    def update(self, group: Mapping[str, Any], master: Tensor, gradients: Gradients, clip: Tensor) -> None:
        """Update one master; see `MasterOptimizer.update`. Collective if ranks share parameters."""
        step, is_skipped = self.count_step(master)
        sliced, states = SlicedGradients(gradients, clip), self.state[master]["parameters"]

        def gradient_and_values(piece: MasterSlice) -> tuple[Tensor, Tensor]:
            return sliced.of(piece), piece.of(master.detach())

        for piece, (gradient, values) in self.wholes(master, gradient_and_values, (torch.float32, torch.float32)):
            old = states[piece.parameter]
            change, new = _step(values, gradient, old, step, group)
            mine = piece.of(master.detach())
            decayed = mine * (1 - float(group["lr"]) * group["weight_decay"])
            write_unless(is_skipped, [mine, *old.values()], [decayed + piece.cut(change), *new.values()])


def second_moment_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the states of a parameter, by PyTorch's names: factored if it has two or more dimensions."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _step(
    values: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: Tensor, group: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a step adds to a whole parameter besides weight decay, and its states afterwards."""
    share = (step**_SECOND_MOMENT_POWER).float()
    relative = (1 / step.sqrt()).clamp(max=float(group["lr"])).float()
    length = _rms(values).clamp(min=_EPSILON_2) * relative
    if "variance" in states:
        new = {"variance": torch.lerp(states["variance"], gradient.square(), share)}
        variance = new["variance"]
    else:
        rows, columns = states["row_var"], states["col_var"]
        new = {
            "row_var": torch.lerp(rows, gradient.square().mean(dim=-1, keepdim=True), share),
            "col_var": torch.lerp(columns, gradient.square().mean(dim=-2, keepdim=True), share),
        }
        variance = new["row_var"] @ new["col_var"]
        variance.div_(new["row_var"].mean(dim=-2, keepdim=True).clamp_(min=_EPSILON_1))
    update = variance.clamp(min=_EPSILON_1**2).rsqrt_().mul_(gradient)
    return update.mul_(-length / (_rms(update) / _CLIPPING_THRESHOLD).clamp(min=1.0)), new


def _rms(tensor: Tensor) -> Tensor:
    """Root mean square of all elements, a scalar."""
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(tensor.numel())
