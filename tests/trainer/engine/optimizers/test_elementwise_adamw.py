"""AdamW that gives each element the same bits wherever the element is in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from spotune_trainer.engine.optimizers import elementwise_adamw
from spotune_trainer.engine.optimizers.elementwise_adamw import elementwise_adamw_step

ELEMENTS = 1000
STEPS = 5
GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def gradients() -> Tensor:
    """Of each step, ``[STEPS, ELEMENTS]``."""
    return torch.randn(STEPS, ELEMENTS, generator=torch.Generator().manual_seed(1)) * 1e-3


def weights() -> Tensor:
    """Before the first step."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(2))


def new_state(elements: int) -> dict[str, Tensor]:
    """AdamW's state before its first step."""
    return {"step": torch.zeros(()), "exp_avg": torch.zeros(elements), "exp_avg_sq": torch.zeros(elements)}


def stepped_in_parts(boundaries: Sequence[int], factor: float = 1.0) -> Tensor:
    """Weights, then moments after all steps, if each part between two boundaries is a master of its own."""
    parts = []
    for start, stop in pairwise([0, *boundaries, ELEMENTS]):
        master, state = weights()[start:stop].clone(), new_state(stop - start)
        for gradient in gradients()[:, start:stop]:
            elementwise_adamw_step(GROUP, state, master, [(0, gradient)], torch.tensor(factor), None)
        parts.append(torch.stack([master, state["exp_avg"], state["exp_avg_sq"]]))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    "boundaries", [[500], [333, 667], [1, 2, 3, 5, 8, 13, 21, 777], range(1, ELEMENTS)], ids=lambda each: str(len(each))
)
def test_an_element_has_the_same_bits_wherever_a_tensor_is_cut(boundaries: Sequence[int]) -> None:
    assert torch.equal(stepped_in_parts(boundaries), stepped_in_parts([]))


def test_a_step_in_chunks_is_the_same() -> None:
    whole = stepped_in_parts([])
    with patch.dict(elementwise_adamw.CHUNK_ELEMENTS, cpu=7):
        assert torch.equal(stepped_in_parts([]), whole)


def test_steps_are_those_of_torch_within_rounding() -> None:
    parameter = torch.nn.Parameter(weights())
    optimizer = torch.optim.AdamW([parameter], **GROUP)
    for gradient in gradients():
        parameter.grad = gradient * 0.5
        optimizer.step()
    state = optimizer.state[parameter]
    expected = torch.stack([parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])
    torch.testing.assert_close(stepped_in_parts([], factor=0.5), expected, rtol=1e-5, atol=1e-9)


def test_integers_are_gradients_in_the_units_of_the_factor() -> None:
    of_floats, of_integers = (weights() for _ in range(2))
    integers = torch.arange(ELEMENTS) - 500
    for master, gradient, factor in ((of_floats, integers / 1024, 1.0), (of_integers, integers, 1 / 1024)):
        elementwise_adamw_step(GROUP, new_state(ELEMENTS), master, [(0, gradient)], torch.tensor(factor), None)
    assert torch.equal(of_integers, of_floats)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    master, state = weights(), new_state(ELEMENTS)
    gradient = torch.full((ELEMENTS,), float("nan"))
    elementwise_adamw_step(GROUP, state, master, [(0, gradient)], torch.tensor(1.0), torch.tensor(1.0))
    assert torch.equal(master, weights())
    assert [float(each.abs().sum()) for each in state.values()] == [0, 0, 0]
