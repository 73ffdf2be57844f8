"""Compiled layers train as eager ones do, and resume exactly, from a cache that another start has written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation, surviving_steps
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from tests.trainer.support.runs import Layout, Runs, committed_state, train_generation

pytestmark = pytest.mark.slow
ignores_non_leaf_gradients = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # which the compiler looks at
)


def test_transformer_layers_are_compiled_and_evaluation_is_not() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=32, **sizes))
    tokens = torch.arange(5)[None]
    model.eval()
    expected = model(input_ids=tokens).logits
    assert len(compile_layers(model)) == 3
    assert [type(layer).__name__ for layer in repeated_layers(model)] == 3 * ["LlamaDecoderLayer"]
    assert torch.equal(model(input_ids=tokens).logits, expected)


@pytest.mark.long
@ignores_non_leaf_gradients
def test_layers_with_the_same_code_are_compiled_once() -> None:
    compiled = []
    for layers in (1, 3):
        torch._dynamo.reset()
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=32, use_cache=False, **sizes))
        compile_layers(model)
        counters.clear()
        model.train()(input_ids=torch.arange(6)[None])
        compiled.append(counters["frames"]["total"])
    assert compiled[0] == compiled[1] > 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.long
def test_a_compiled_run_matches_an_eager_one_and_resumes_exactly(runs: Runs, stage: int) -> None:
    layout = Layout(world_size=2, zero_stage=stage)
    job = runs.job("causal", dropout=False, execution={"compile": True})
    plain = runs.empty("plain")
    train_generation(plain, runs.job("causal", dropout=False), layout, micro_batch_size=1)
    resumed, whole = runs.with_and_without_loss(job, layout, micro_batch_size=1, timeout=400)
    steps, again = surviving_steps(whole), surviving_steps(resumed)
    assert [step["samples"] for step in steps] == [step["samples"] for step in surviving_steps(plain)]
    assert [step["loss"] for step in steps] == pytest.approx(
        [step["loss"] for step in surviving_steps(plain)], rel=1e-4
    )
    assert [step["loss"] for step in again] == [step["loss"] for step in steps]
    expected, found = committed_state(whole, 10), committed_state(resumed, 10)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    events = files.read_lines(resumed.generation_logs(latest_generation(resumed)).events)
    assert [event["start"] for event in events if event["event"] == "compiled"] == ["warm"]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_gradient_checkpointing_does_not_change_the_results(runs: Runs, stage: int) -> None:
    """With dropout: the recomputed forward pass must draw the same random numbers."""
    layout, found = Layout(world_size=1, zero_stage=stage), []
    for recompute in (False, True):
        directory = runs.empty("recomputed")
        job = runs.job("causal", execution={"compile": True, "gradientCheckpointing": recompute})
        train_generation(directory, job, layout, micro_batch_size=1, timeout=400)
        found.append(([step["loss"] for step in surviving_steps(directory)], committed_state(directory, 10)))
    (losses, kept), (again, recomputed) = found
    assert losses == again
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []
