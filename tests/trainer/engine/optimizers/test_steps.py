"""The optimizers take the steps of the libraries that define them, and skip a step with a nonfinite gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from spotune_trainer.checkpoint.fragment import SCHEDULE_FREE_BASE
from spotune_trainer.checkpoint.reader import schedule_free_average
from spotune_trainer.engine.optimizers import schedule_free
from spotune_trainer.engine.optimizers.adafactor import Adafactor
from spotune_trainer.engine.optimizers.build import build_optimizer, hidden_matrices
from spotune_trainer.engine.optimizers.master_optimizer import MasterOptimizer, MasterSlice
from spotune_trainer.engine.optimizers.muon import Muon
from spotune_trainer.engine.optimizers.schedule_free import ScheduleFreeAdamW
from tests.trainer.support.tiny import make_job

SHAPES = ((6, 4), (4, 7), (9, 3), (3, 5, 2), (5,))
MATRICES = 3
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-8}
DECAY = 0.1
RATES = [0.0, 0.004, 0.008, *[0.01] * 12]
"""A warm-up from zero, as transformers has it."""


def parameters() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def announced(optimizer: MasterOptimizer, masters: Sequence[nn.Parameter]) -> MasterOptimizer:
    """Announce whole parameters, which are their own masters."""
    for number, master in enumerate(masters):
        optimizer.add_slice(MasterSlice(str(number), tuple(master.shape), 0, master, 0, master.numel()))
    return optimizer


def group(masters: Sequence[nn.Parameter], **settings: Any) -> dict[str, Any]:
    return {"params": list(masters), "weight_decay": DECAY, **settings}


def of_muon(masters: Sequence[nn.Parameter]) -> MasterOptimizer:
    hidden, others = masters[:MATRICES], masters[MATRICES:]
    return announced(Muon([group(hidden, momentum=0.95), group(others)], SETTINGS), masters)


def of_adafactor(masters: Sequence[nn.Parameter]) -> MasterOptimizer:
    return announced(Adafactor([group(masters)], {"lr": 0.01}), masters)


def of_schedule_free(masters: Sequence[nn.Parameter]) -> MasterOptimizer:
    return announced(ScheduleFreeAdamW([group(masters)], SETTINGS), masters)


def muon_of_torch(masters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    hidden, others = masters[:MATRICES], masters[MATRICES:]
    muon = torch.optim.Muon(hidden, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, weight_decay=DECAY, **SETTINGS)]


def adafactor_of_torch(masters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(masters, weight_decay=DECAY)]


def schedule_free_of_the_library(masters: Sequence[nn.Parameter]) -> list[Any]:
    optimizer: Any = schedulefree.AdamWScheduleFree(masters, weight_decay=DECAY, **SETTINGS)
    optimizer.train()
    return [optimizer]


def stepped(masters: Sequence[nn.Parameter], optimizers: Sequence[Any], rates: Sequence[float] = RATES) -> None:
    """A step of each learning rate, with gradients that are the same for every optimizer."""
    random = torch.Generator().manual_seed(1)
    for rate in rates:
        for master in masters:
            master.grad = torch.randn(master.shape, generator=random).add_(0.3)
        for optimizer in optimizers:
            for each in optimizer.param_groups:
                each["lr"] = rate
            optimizer.step()


def differences(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    return [float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)]


PAIRS = [
    pytest.param(of_schedule_free, schedule_free_of_the_library, id="schedule_free_adamw"),
    pytest.param(of_adafactor, adafactor_of_torch, id="adafactor"),
    pytest.param(of_muon, muon_of_torch, id="muon"),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_steps_are_those_of_the_library(
    ours: Callable[..., MasterOptimizer], theirs: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_free, "_CHUNK_ELEMENTS", 7)  # so that chunks end within parameters
    mine, wanted = parameters(), parameters()
    stepped(mine, [ours(mine)])
    stepped(wanted, theirs(wanted))
    assert max(differences(mine, wanted)) < 2e-6
    assert min(differences(mine, parameters())) > 0.01, "all have moved"


def test_the_average_of_schedule_free_is_that_of_the_library() -> None:
    mine, theirs = parameters(), parameters()
    ours, [library] = of_schedule_free(mine), schedule_free_of_the_library(theirs)
    stepped(mine, [ours])
    stepped(theirs, [library])
    beta1 = SETTINGS["betas"][0]
    averages = [schedule_free_average(each.detach(), ours.state[each][SCHEDULE_FREE_BASE], beta1) for each in mine]
    library.eval()
    assert max(differences(averages, theirs)) < 2e-6
    assert min(differences(averages, mine)) > 1e-3, "the average is not where gradients are computed"


@pytest.mark.parametrize("ours", [of_schedule_free, of_adafactor, of_muon])
def test_a_nonfinite_gradient_changes_nothing(ours: Callable[..., MasterOptimizer]) -> None:
    masters = parameters()
    optimizer = ours(masters)
    stepped(masters, [optimizer], RATES[:3])
    before = [master.detach().clone() for master in masters]
    states = flat_states(optimizer)
    optimizer.found_inf = torch.ones(())
    for master in masters:
        master.grad = torch.full_like(master, float("nan"))
    optimizer.step()
    assert all(torch.equal(found, was) for found, was in zip(masters, before, strict=True))
    assert all(torch.equal(found, was) for found, was in zip(flat_states(optimizer), states, strict=True))
    optimizer.found_inf = torch.zeros(())
    stepped(masters, [optimizer], RATES[-1:])
    assert all(bool(master.isfinite().all()) for master in masters)
    assert not any(torch.equal(found, was) for found, was in zip(masters, before, strict=True))


def flat_states(optimizer: MasterOptimizer) -> list[Tensor]:
    """Copies of all tensors in the state of an optimizer."""

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value.clone()]
        return [each for inner in value.values() for each in tensors(inner)]

    return tensors(dict(optimizer.state))


def test_muon_updates_the_matrices_of_hidden_layers_only() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=2, tie_word_embeddings=False, **sizes))
    assert {name.rsplit(".", 2)[1] for name in hidden_matrices(llama)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=9, n_embd=8, n_layer=1, n_head=2))
    assert {name.rsplit(".", 2)[1] for name in hidden_matrices(gpt)} == {"c_attn", "c_proj", "c_fc"}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2))
    assert {name.rsplit(".", 2)[1] for name in hidden_matrices(t5)} == {"q", "k", "v", "o", "wi", "wo"}


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [
        (BertForSequenceClassification, BertConfig),
        (RobertaForSequenceClassification, RobertaConfig),
        (LlamaForTokenClassification, LlamaConfig),
    ],
)
def test_muon_does_not_update_a_head_for_labels(model_class: Any, config_class: Any) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = model_class(config_class(vocab_size=20, **sizes, num_labels=3))
    names = hidden_matrices(model)
    assert names
    assert not [name for name in names if name.startswith(("classifier.", "score."))]


def test_weight_decay_applies_to_matrices_only() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=1, **sizes))
    training = make_job("/model", training={"optimizer": "muon", "weightDecay": 0.1}).spec.training
    groups = build_optimizer(model, training, compiled=False).param_groups
    assert [(each["weight_decay"], each.get("momentum")) for each in groups] == [(0.1, 0.95), (0.1, None), (0.0, None)]
    assert [{p.ndim for p in each["params"]} for each in groups] == [{2}, {2}, {1}]
    assert sum(len(each["params"]) for each in groups) == len(list(model.parameters()))
