"""The odds ratio loss is accurate, and has finite gradients however certain an answer is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spotune_trainer.objectives import preference
from spotune_trainer.objectives.pair_log_probs import PairLogProbs
from spotune_trainer.objectives.preference import Orpo


def odds_ratio_loss(monkeypatch: pytest.MonkeyPatch, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds ratio loss of answers of one token with these log-probabilities."""
    one = torch.ones_like(chosen)
    log_probs = PairLogProbs(chosen, rejected, one, one, chosen_text=chosen.sum())
    monkeypatch.setattr(preference, "pair_log_probs", lambda *_: log_probs)
    unused: Any = None
    return Orpo(1.0)(unused, unused).losses[1]


@pytest.mark.parametrize("certain", [0.0, -1e-30, -1e-9, -6e-8, -1.2e-7, -1e-4])
@pytest.mark.parametrize("other", [0.0, -1e-8, -0.5, -200.0])
def test_gradients_are_finite_if_an_answer_is_certain(
    monkeypatch: pytest.MonkeyPatch, certain: float, other: float
) -> None:
    for values in ((certain, other), (other, certain)):
        chosen, rejected = (torch.tensor([value], requires_grad=True) for value in values)
        loss = odds_ratio_loss(monkeypatch, chosen, rejected)
        torch.autograd.backward([loss])
        assert chosen.grad is not None
        assert rejected.grad is not None
        assert torch.isfinite(torch.stack([loss, *chosen.grad, *rejected.grad])).all()


def test_loss_and_gradients_are_those_of_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs = -torch.logspace(-6, 2, 200, dtype=torch.float32)
    single = log_probs.clone().requires_grad_()
    torch.autograd.backward([odds_ratio_loss(monkeypatch, single, torch.full_like(single, -0.5))])
    exact = log_probs.double().requires_grad_()
    log_odds = exact - torch.log1p(-torch.exp(exact))
    other = torch.tensor(-0.5, dtype=torch.float64)
    expected = -torch.nn.functional.logsigmoid(log_odds - (other - torch.log1p(-torch.exp(other)))).sum()
    torch.autograd.backward([expected])
    loss = odds_ratio_loss(monkeypatch, log_probs, torch.full_like(log_probs, -0.5)).item()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert single.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(single.grad.double(), exact.grad, rtol=1e-5, atol=0)
