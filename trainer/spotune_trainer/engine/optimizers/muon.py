"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon). The
author applies it to 2-D weights of hidden layers only: embeddings, output head, norms and biases take AdamW's steps.
Updates are scaled by 0.2 sqrt(max(rows, columns)), which gives them the RMS of AdamW's (Liu et al. 2025, "Muon is
Scalable for LLM Training", arXiv:2502.16982, equation 4). So one learning rate and one weight decay serve both.

The arithmetic is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`. That class needs whole parameters and
cannot skip a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from spotune_trainer.engine.optimizers.adamw8bit import MOMENTS
from spotune_trainer.engine.optimizers.fused_adamw import fused_adamw_step
from spotune_trainer.engine.optimizers.master_optimizer import Gradients, MasterSlice, write_unless
from spotune_trainer.engine.optimizers.whole_parameters import SlicedGradients, WholeParameterOptimizer

MOMENTUM_BUFFER = "momentum_buffer"
"""Muon's only state, by PyTorch's name."""
_COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)


class Muon(WholeParameterOptimizer):
    """Muon with Nesterov momentum in groups with `momentum`, which have matrices only; AdamW in all others."""

    def _initial_state(self, master: Tensor) -> dict[str, Any]:
        group = next(group for group in self.param_groups if any(each is master for each in group["params"]))
        names = (MOMENTUM_BUFFER,) if _is_muon(group) else MOMENTS
        return {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in names}

    def elementwise_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """Muon's momentum or AdamW's moments."""
        state = self.create_state(piece.master)
        return {name: piece.of(state[name]) for name in (MOMENTUM_BUFFER, *MOMENTS) if name in state}

    @torch.no_grad()
    def update(self, group: Mapping[str, Any], master: Tensor, gradients: Gradients, clip: Tensor) -> None:
        """Update one master; see `MasterOptimizer.update`. Collective if ranks share matrices."""
        state = self.create_state(master)
        if not _is_muon(group):
            fused_adamw_step(group, state, master, gradients, clip, self.found_inf)
            return
        _, is_skipped = self.count_step(master)
        sliced, rate, momentum = SlicedGradients(gradients, clip), float(group["lr"]), group["momentum"]

        def direction(piece: MasterSlice) -> tuple[Tensor]:
            gradient, buffer = sliced.of(piece), piece.of(state[MOMENTUM_BUFFER])
            updated = torch.lerp(buffer, gradient, 1 - momentum)
            write_unless(is_skipped, [buffer], [updated])
            return (torch.lerp(gradient, updated, momentum).bfloat16(),)

        for piece, (matrix,) in self.wholes(master, direction, (torch.bfloat16,)):
            orthogonal = _orthogonalize(matrix)
            adjusted = _muon._adjust_lr(rate, "match_rms_adamw", matrix.shape)
            values = piece.of(master.detach())
            decayed = values * (1 - rate * group["weight_decay"])
            write_unless(is_skipped, [values], [decayed.add_(piece.cut(orthogonal), alpha=-adjusted)])


def _orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, roughly, by five Newton-Schulz iterations in bf16."""
    orthogonal: Tensor = _muon._zeropower_via_newtonschulz(matrix, _COEFFICIENTS, _muon.DEFAULT_NS_STEPS, _muon.EPS)
    return orthogonal


def _is_muon(group: Mapping[str, Any]) -> bool:
    return group.get("momentum") is not None
