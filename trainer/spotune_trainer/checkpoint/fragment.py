"""A fragment: the unit of a checkpoint, and what the files of every rank hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Names of a fragment's tensors, as in DeepSpeed's universal checkpoints: master weight and Adam's two moments."""


class Elements(Protocol):
    """fp32 elements that can be read in order: those of a 1-D tensor, or of what makes one piece by piece."""

    @property
    def device(self) -> torch.device:
        """Where they are when they are read."""

    def numel(self) -> int:
        """How many there are."""

    def split(self, split_size: int) -> Iterable[Tensor]:
        """All of them, at most so many at a time."""


@dataclass(frozen=True)
class HeldFragment:
    """A run of one parameter's elements as an engine holds it, in whatever form.

    Attributes:
        parameter: the parameter's name in the model.
        offset: first element within the flattened parameter.
        states: for each of `STATES` elements of the same number.
    """

    parameter: str
    offset: int
    states: Mapping[str, Elements]


@dataclass(frozen=True)
class Fragment(HeldFragment):
    """A run of one parameter's elements in fp32: each state is a 1-D tensor that may be read and written in place."""

    states: dict[str, Tensor]
