"""Fragments, the unit of a checkpoint: each is a contiguous range of one parameter's elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Names of a fragment's tensors, as in DeepSpeed's universal checkpoints: fp32 master weight, Adam's two moments."""


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
        offset: index of the first element within the flattened parameter.
        states: the elements of each of `STATES`; all states have the same number.
    """

    parameter: str
    offset: int
    states: Mapping[str, Elements]


@dataclass(frozen=True)
class Fragment(FragmentSource):
    """A fragment in fp32: each state is a 1-D tensor `[elements]` that may be read and written in place."""

    states: dict[str, Tensor]
