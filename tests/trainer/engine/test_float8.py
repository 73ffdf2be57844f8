"""Layers in FP8, which processors emulate: what is converted, and that runs resume with the same bits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torchao.float8.float8_linear import Float8Linear
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from spotune.errors import JobError
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.engine.compile.gradient_accumulation_fusion import fuse_gradient_accumulation
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from spotune_trainer.engine.float8 import check_device, convert_to_float8
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.runs import STEPS, Layout, Runs, committed_state, losses, train_generation

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 48,
}
ADAPTER: dict[str, Any] = {"adapter": {"lora": {"r": 16, "dropout": 0.1}}}
LONG = pytest.mark.long


def llama(**sizes: int) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    return model.to(torch.bfloat16)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def test_linear_modules_of_layers_are_converted_and_head_and_embedding_are_not() -> None:
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    assert convert_to_float8(repeated_layers(model), "fp8") == []
    expected = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"}
    expected |= {f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("gate", "up", "down")}
    assert converted(model) == expected
    assert [name for name, _ in model.named_parameters()] == names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_modules_of_odd_sizes_stay_in_bfloat16_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(intermediate_size=72)
    with caplog.at_level(logging.WARNING, "spotune.worker"):
        skipped = convert_to_float8(repeated_layers(model), "fp8")
    assert skipped == ["mlp.down_proj (72 x 32)", "mlp.gate_proj (32 x 72)", "mlp.up_proj (32 x 72)"]
    assert "mlp.down_proj (72 x 32)" in caplog.text
    assert len(converted(model)) == 2 * 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=48)), "its layers have none"),
        (llama(hidden_size=24, intermediate_size=40), r"no multiples of 16: mlp.down_proj \(40 x 24\)"),
    ],
    ids=["GPT-2, whose modules are no linear ones", "only odd sizes"],
)
def test_a_model_with_nothing_to_convert_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(JobError, match=rf"^execution\.precision: fp8 .*{reason}"):
        convert_to_float8(repeated_layers(model), "fp8")


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_gradients_of_a_converted_module_are_those_of_its_rounded_factors(precision: Any) -> None:
    """Within what 8 bits resolve: 3 bits of mantissa in e4m3 and 2 in e5m2 are a relative error of 1/8 at most."""
    torch.manual_seed(0)
    layer: Any = nn.ModuleDict({"up": nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)})
    rows = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(48, 64, dtype=torch.bfloat16)
    plain = layer["up"](rows)
    expected = torch.autograd.grad(plain, [rows, layer["up"].weight], gradient)
    convert_to_float8([layer], precision)
    product = layer["up"](rows)
    found = torch.autograd.grad(product, [rows, layer["up"].weight], gradient)
    for one, other in zip((product, *found), (plain, *expected), strict=True):
        difference = ((one - other).norm() / other.norm()).item()
        assert 0.005 < difference < 0.1


def test_evaluation_computes_in_bfloat16_as_the_exported_model_does() -> None:
    model, tokens = llama(), torch.arange(7)[None]
    expected = model.eval()(input_ids=tokens).logits
    convert_to_float8(repeated_layers(model), "fp8")
    assert torch.equal(model.eval()(input_ids=tokens).logits, expected)
    assert not torch.equal(model.train()(input_ids=tokens).logits, expected)


def test_gradients_of_float8_modules_are_not_accumulated_by_their_products() -> None:
    """PyTorch's product of 8-bit floats cannot start from an accumulated gradient: autograd adds it."""
    model = llama(intermediate_size=72)
    convert_to_float8(repeated_layers(model), "fp8")
    before = converted(model)
    fuse_gradient_accumulation(repeated_layers(model))
    assert converted(model) == before
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "_FusedLinear", "which stayed in bfloat16"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which the compiler looks at
@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
@pytest.mark.long
def test_a_compiled_layer_saves_neither_8_bit_weights_nor_what_it_casts(precision: Any) -> None:
    """Saved casts of weights would be a copy of the model, also at ZeRO stage 3; `spotune plan` counts none."""
    tokens, wide = 256, SIZES["intermediate_size"]
    found = {}
    for each in ("bf16", precision):
        model = llama(num_hidden_layers=1).train()
        if each != "bf16":
            convert_to_float8(repeated_layers(model), each)
        [layer] = compile_layers(model)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(saved: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[saved.untyped_storage().data_ptr()] = saved.detach()
            return saved

        rows = torch.randn(1, tokens, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(tokens)[None]
        with saved_tensors_hooks(keep, lambda saved: saved):
            layer(rows, position_embeddings=model.model.rotary_emb(rows, positions), position_ids=positions)
        found[each] = [tensor for storage, tensor in kept.items() if storage not in weights]
    assert all(tensor.numel() < 16 or tokens in tensor.shape for tensor in found[precision])
    saved = {name: sum(tensor.numel() for tensor in of if tensor.numel() >= 16) for name, of in found.items()}
    assert saved["bf16"] - saved[precision] == tokens * (wide + 2 * SIZES["hidden_size"]), "as spotune plan counts"


@pytest.mark.parametrize(
    ("precision", "capability", "devices"),
    [("fp8", (8, 6), "L4, L40S, H100 or newer"), ("fp8-rowwise", (8, 9), "H100 or newer")],
)
def test_gpus_without_fp8_are_refused_with_the_gpu_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, precision: Any, capability: tuple[int, int], devices: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10G")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    has = ".".join(map(str, capability))
    with pytest.raises(JobError, match=rf"^execution\.precision: {precision} .*NVIDIA A10G has {has}: use {devices}"):
        check_device(precision)
    check_device("auto")


def job_of(runs: Runs, precision: str = "fp8", **sections: Any) -> Any:
    execution = {"precision": precision, "deterministic": True, **sections.pop("execution", {})}
    return runs.job("causal", "bfloat16", execution=execution, **sections)


@pytest.mark.long
@pytest.mark.slow
def test_fp8_trains_as_bfloat16_does_and_to_other_bits(runs: Runs) -> None:
    found, training = {}, {"learningRate": 0.01}
    for precision in ("bf16", "fp8", "fp8-rowwise"):
        found[precision] = runs.empty(precision)
        train_generation(found[precision], job_of(runs, precision, training=training), Layout(1, 1))
    exact = losses(found["bf16"])
    for precision in ("fp8", "fp8-rowwise"):
        steps = losses(found[precision])
        assert steps != exact
        assert steps[-1] < steps[0] - 0.2
        assert steps == pytest.approx(exact, abs=0.03)
    assert losses(found["fp8"]) != losses(found["fp8-rowwise"])


CASES = [
    pytest.param(Layout(2, 1), {}, id="stage 1", marks=LONG),
    pytest.param(Layout(2, 3), {}, id="stage 3"),
    pytest.param(Layout(2, 2), ADAPTER, id="LoRA, stage 2"),
    pytest.param(Layout(2, 2), {"training": {"optimizer": "adamw8bit"}}, id="adamw8bit, stage 2", marks=LONG),
    pytest.param(Layout(1, 1), {"execution": {"precision": "fp8-rowwise"}}, id="rowwise", marks=LONG),
    pytest.param(Layout(2, 3), {"execution": {"gradientCheckpointing": True}}, id="checkpointing", marks=LONG),
    pytest.param(
        Layout(2, 2), {"execution": {"reproducible": "worldSize", "microBatchSize": 3}}, id="fixed point", marks=LONG
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "sections"), CASES)
def test_an_interrupted_run_ends_with_the_same_bits(runs: Runs, layout: Layout, sections: dict[str, Any]) -> None:
    resumed, undisturbed = runs.with_and_without_loss(job_of(runs, **sections), layout)
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_run_resumes_exactly_and_trains_as_an_eager_one(runs: Runs, stage: int) -> None:
    layout = Layout(1, stage)
    job = job_of(runs, dropout=False, execution={"compile": True})
    eager = runs.empty("eager")
    train_generation(eager, job_of(runs, dropout=False), layout, micro_batch_size=1)
    resumed, undisturbed = runs.with_and_without_loss(job, layout, micro_batch_size=1, timeout=400)
    assert losses(undisturbed) == pytest.approx(losses(eager), rel=5e-3)
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_and_recomputed_adapter_on_a_base_in_fp8_resumes_exactly(runs: Runs) -> None:
    job = job_of(runs, execution={"compile": True, "gradientCheckpointing": True}, **ADAPTER)
    resumed, undisturbed = runs.with_and_without_loss(job, Layout(1, 2), micro_batch_size=1, timeout=400)
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
@pytest.mark.long
def test_zero_stages_give_the_same_losses(runs: Runs) -> None:
    """Scales come from whole matrices at all stages: stage 3 gathers the bfloat16 weights before they are cast."""
    found = []
    for stage in (1, 2, 3):
        run = runs.empty(f"stage-{stage}")
        train_generation(run, job_of(runs), Layout(2, stage))
        found.append(run)
    first, *others = found
    for run in others:
        assert [step["samples"] for step in surviving_steps(run)] == [
            step["samples"] for step in surviving_steps(first)
        ]
        assert losses(run) == pytest.approx(losses(first), rel=2e-3)


@pytest.mark.long
@pytest.mark.slow
def test_gradient_checkpointing_does_not_change_the_bits(runs: Runs) -> None:
    kept, again = (runs.empty(name) for name in ("kept", "recomputed"))
    train_generation(kept, job_of(runs), Layout(1, 1))
    train_generation(again, job_of(runs, execution={"gradientCheckpointing": True}), Layout(1, 1))
    assert losses(kept) == losses(again)
    wanted, found = committed_state(kept, STEPS), committed_state(again, STEPS)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.long
@pytest.mark.slow
def test_an_adapter_trains_in_bfloat16_on_a_base_in_fp8(runs: Runs) -> None:
    exact, base = runs.empty("exact"), runs.empty("base")
    train_generation(exact, job_of(runs, "auto", **ADAPTER), Layout(1, 1))
    train_generation(base, job_of(runs, **ADAPTER), Layout(1, 1))
    assert losses(base) != losses(exact)
    assert losses(base) == pytest.approx(losses(exact), rel=0.01)
    assert all("lora_" in name for name in committed_state(base, STEPS))


def test_matrices_of_an_adapter_are_not_converted(runs: Runs) -> None:
    job = job_of(runs, **ADAPTER)
    model = attach_adapter(build_model(job), job)
    convert_to_float8(repeated_layers(model), "fp8")
    names = converted(model)
    assert len(names) == 2 * 7
    assert all(name.endswith(".base_layer") for name in names)
