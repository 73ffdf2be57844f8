"""Small models with recomputed layers, and what a training step of them does."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.engine.activations.recomputation import ATTENTION_OPERATORS

TOKENS = 64
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 40,
}


def make_model(layers: int, *, adapter: bool = False) -> Any:
    """A model in training mode with the same weights in each call; adapters have dropout."""
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **CONFIG))
    if adapter:
        lora = LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora)
    return model.train()


def base_of(model: Any) -> Any:
    """The transformers model beneath adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def gradients(model: Any, **inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of one step, with dropout from a fixed seed."""
    tokens = torch.arange(TOKENS)[None] % CONFIG["vocab_size"]
    torch.manual_seed(2)
    model.zero_grad()
    torch.autograd.backward(model(input_ids=tokens, labels=tokens, **inputs).loss)
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of gradients that differ in any bit."""
    assert found.keys() == expected.keys()
    return [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]


class _AttentionCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    calls: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in ATTENTION_OPERATORS
        return func(*args, **(kwargs or {}))


def attention_calls(model: Any) -> int:
    """How often one step computes attention's forward pass, without compiled layers."""
    counter = _AttentionCounter()  # type: ignore[no-untyped-call]
    with counter:
        gradients(model)
    return int(counter.calls)


def compiled_attention_calls(model: Any) -> int:
    """The same with compiled layers, which do not run under a dispatch mode."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        gradients(model)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return sum(event.count for event in profiled.key_averages() if event.key == name)
