"""A fragment: the unit of a checkpoint, and what the files of every rank hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Names of a fragment's tensors, as in DeepSpeed's universal checkpoints: master weight and Adam's two moments."""


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements, with views of its state that may be read and written in place.

    Attributes:
        parameter: the parameter's name in the model.
        offset: first element within the flattened parameter.
        states: for each of `STATES` a 1-D fp32 view of the same length.
    """

    parameter: str
    offset: int
    states: dict[str, Tensor]
