"""The states of the random number generators of this process, for checkpoints from which training continues exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_states() -> dict[str, Any]:
    """States of the generators of Python, NumPy, PyTorch, and of this process's GPU."""
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    """Continue from what `random_states` has returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
