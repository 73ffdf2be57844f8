"""Fragments, the unit of a checkpoint: each is a contiguous range of one parameter's elements.

A parameter has several states: its fp32 master weight, and what its optimizer keeps. Most states have an element for
each element of the parameter. States of another size, such as Adafactor's factored second moment, have fragments of
their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MASTER = "fp32"
"""State that every parameter has: its fp32 master weight."""
STATES = (MASTER, "exp_avg", "exp_avg_sq")
"""States of a parameter that AdamW trains, as in DeepSpeed's universal checkpoints: master weight and two moments."""
SCHEDULE_FREE_BASE = "z"
"""State that schedule-free AdamW has beside its master weight: the sequence that takes the gradient steps."""
EMA = "ema"
"""State with `training.emaDecay`: the exponential moving average of the master weight."""


class Elements(Protocol):
    """fp32 elements that can be read in order: a 1-D tensor, or an object that computes them chunk by chunk."""

    @property
    def device(self) -> torch.device:
        """The device that `split` yields them on."""

    def numel(self) -> int:
        """Number of elements."""

    def split(self, split_size: int) -> Iterable[Tensor]:
        """All elements in order, as 1-D tensors of at most `split_size` elements."""


@dataclass(frozen=True)
class FragmentSource:
    """A fragment as an engine holds it, in any form that can be read as fp32.

    Attributes:
        parameter: the parameter's name in the model.
        offset: index of the first element within the flattened parameter, or within the flattened state if that has
            another size.
        states: the elements of one or more states by name; all have the same number.
    """

    parameter: str
    offset: int
    states: Mapping[str, Elements]


@dataclass(frozen=True)
class Fragment(FragmentSource):
    """A fragment in fp32: each state is a 1-D tensor `[elements]` that may be read and written in place."""

    states: dict[str, Tensor]
