"""Compiled layers train as eager ones do, resume exactly, and are compiled once for all attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import LlamaConfig, LlamaForCausalLM

from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.engine.compile.cache import CompileCache
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from tests import ROOT
from tests.trainer.support.runs import Layout, Runs, committed_state, train_generation

pytestmark = pytest.mark.slow
ignores_non_leaf_gradients = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # which the compiler looks at
)

START = """
import json, sys
from pathlib import Path
from tests.trainer.engine.compile.test_layers import compile_with_cache
print(json.dumps(compile_with_cache(Path(sys.argv[1]))))
"""


def compile_with_cache(kept: Path) -> dict[str, int]:
    """Compile a model with the cache in a folder; returns how many graphs were compiled and loaded."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32, **sizes))
    cache = CompileCache(kept, writes=True)
    cache.load()
    compile_layers(model)
    model.train()(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()
    cache.save()
    cache.wait()
    made = sum(counters["inductor"][name] for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass"))
    return {"made": made, "found": counters["aot_autograd"]["autograd_cache_hit"]}


def start(kept: Path, scratch: Path) -> dict[str, int]:
    """Run `compile_with_cache` in a process with an empty local cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(scratch)}
    command = [sys.executable, "-c", START, str(kept)]
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.long
@ignores_non_leaf_gradients
def test_compiled_code_is_loaded_into_an_empty_cache(tmp_path: Path) -> None:
    """The test below does the same with two processes."""
    found = []
    for _ in range(2):
        with fresh_cache():
            torch._dynamo.reset()
            counters.clear()
            found.append(compile_with_cache(tmp_path))
    first, second = found
    assert first["made"] > 0
    assert second["made"] == 0
    assert second["found"] > 0


@pytest.mark.long
def test_the_next_start_loads_what_was_compiled_before(tmp_path: Path) -> None:
    first = start(tmp_path / "compiled", tmp_path / "first")
    second = start(tmp_path / "compiled", tmp_path / "second")
    assert first["made"] > 0
    assert second["made"] == 0
    assert second["found"] > 0


def test_a_damaged_cache_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CompileCache(tmp_path, writes=True)
    cache.path.write_bytes(b"torn")
    cache.load()
    assert "checksum does not match" in caplog.text


def test_transformer_layers_are_compiled_and_evaluation_is_not() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=32, **sizes))
    tokens = torch.arange(5)[None]
    model.eval()
    expected = model(input_ids=tokens).logits
    assert len(compile_layers(model)) == 3
    assert [type(layer).__name__ for layer in repeated_layers(model)] == 3 * ["LlamaDecoderLayer"]
    assert torch.equal(model(input_ids=tokens).logits, expected)


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


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
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
    assert any((whole.root / "compiled").iterdir())


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
