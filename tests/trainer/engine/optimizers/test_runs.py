"""Whole runs with each optimizer and with a moving average: interrupted, evaluated and exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.reader import schedule_free_average
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.evaluation.evaluate import evaluate
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import load_tokenizer
from tests.trainer.support.runs import STEPS, STEPS_PER_EPOCH, Layout, Runs, committed_state, losses, train_generation

pytestmark = pytest.mark.slow

SCHEDULE_FREE = {"optimizer": "schedule_free_adamw", "scheduler": "constant_with_warmup"}
LONG = pytest.mark.long
CASES = [
    pytest.param(SCHEDULE_FREE, Layout(2, 3), "bfloat16", id="schedule_free_adamw, stage 3", marks=LONG),
    pytest.param(SCHEDULE_FREE, Layout(2, 0), "float32", id="schedule_free_adamw, stage 0", marks=LONG),
    pytest.param({"optimizer": "muon", "emaDecay": 0.9}, Layout(2, 2), "bfloat16", id="muon with EMA, stage 2"),
    pytest.param({"optimizer": "adafactor"}, Layout(2, 1), "float32", id="adafactor, stage 1", marks=LONG),
    pytest.param({"optimizer": "adamw8bit", "emaDecay": 0.9}, Layout(2, 3), "float32", id="8 bit, EMA", marks=LONG),
]


ADAPTER = {"adapter": {"lora": {"r": 4, "dropout": 0.1}}}
HOST = {"execution": {"offload": "optimizer"}}
ALL_IN_HOST = {"execution": {"offload": "parameters"}}
CASES_WITH_SECTIONS = [
    pytest.param(SCHEDULE_FREE, Layout(2, 1), ADAPTER, id="schedule_free_adamw, adapter, stage 1"),
    pytest.param(SCHEDULE_FREE, Layout(2, 3), ADAPTER, id="schedule_free_adamw, adapter, stage 3"),
    pytest.param({"optimizer": "adafactor"}, Layout(2, 0), ADAPTER, id="adafactor, adapter, stage 0"),
    pytest.param({"optimizer": "adafactor"}, Layout(2, 2), ADAPTER, id="adafactor, adapter, stage 2"),
    pytest.param({"emaDecay": 0.9}, Layout(2, 2), HOST, id="EMA, optimizer in host memory"),
    pytest.param({"emaDecay": 0.9}, Layout(2, 3), ALL_IN_HOST, id="EMA, parameters in host memory"),
    pytest.param({"emaDecay": 0.9}, Layout(2, 2), {**ADAPTER, **HOST}, id="EMA, adapter, optimizer in host memory"),
]


def job_of(
    runs: Runs, training: dict[str, Any], dtype: str, *, evaluated: bool = False, **sections: Any
) -> FinetuneJob:
    dataset = {"eval": {"source": str(runs.shards("causal"))}}
    every = {"evaluation": {"everySteps": 2}} if evaluated else {}
    return runs.job("causal", dtype, training={**training, **every}, dataset=dataset if evaluated else {}, **sections)


@pytest.mark.parametrize(("training", "layout", "dtype"), CASES)
def test_an_interrupted_and_evaluated_run_ends_with_the_same_weights(
    runs: Runs, training: dict[str, Any], layout: Layout, dtype: str
) -> None:
    resumed_alike(runs, training, layout, dtype)


@pytest.mark.long
@pytest.mark.parametrize(("training", "layout", "sections"), CASES_WITH_SECTIONS)
def test_so_does_one_with_an_adapter_or_in_host_memory(
    runs: Runs, training: dict[str, Any], layout: Layout, sections: dict[str, Any]
) -> None:
    resumed_alike(runs, training, layout, "float32", **sections)


def resumed_alike(runs: Runs, training: dict[str, Any], layout: Layout, dtype: str, **sections: Any) -> None:
    """Check that a run that is interrupted, and evaluated when it goes on, ends as an undisturbed one, bit for bit."""
    undisturbed = runs.empty("undisturbed")
    train_generation(undisturbed, job_of(runs, training, dtype, **sections), layout)
    resumed = runs.interrupted(undisturbed, step=STEPS_PER_EPOCH)
    train_generation(resumed, job_of(runs, training, dtype, evaluated=True, **sections), layout)
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert found.keys() == wanted.keys()
    names = ["export", "export-ema"] if "emaDecay" in training else ["export"]
    for name in names:
        file = f"{name}/model.safetensors"
        assert (resumed.root / file).read_bytes() == (undisturbed.root / file).read_bytes()
    assert (undisturbed.root / "export-ema").exists() is ("emaDecay" in training)


def exported(run: JobDirectory, folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor.flatten() for name, tensor in load_file(run.root / folder / "model.safetensors").items()}


def test_schedule_free_evaluates_and_exports_the_average(runs: Runs) -> None:
    run, job = runs.empty("schedule-free"), job_of(runs, SCHEDULE_FREE, "float32", evaluated=True)
    train_generation(run, job, Layout(2, 2))
    state, weights = committed_state(run, STEPS), exported(run, "export")
    for name, found in weights.items():
        assert torch.equal(found, schedule_free_average(state[f"{name}/fp32"], state[f"{name}/z"], 0.9))
        assert not torch.equal(found, state[f"{name}/fp32"]), "the weights that gradients are computed at"
    events = files.read_lines(run.generation_logs(1).events)
    [reported] = [event["loss"] for event in events if event["event"] == "evaluated" and event["step"] == STEPS]
    model: Any = AutoModelForCausalLM.from_pretrained(run.export)
    rows = ShardedDataset(str(runs.shards("causal")), runs.root / "cache-average")
    result = evaluate(model, rows, load_tokenizer(job), job, batch_size=4)
    assert reported == pytest.approx(result.loss, rel=1e-6)


def test_the_moving_average_is_exported_beside_the_weights(runs: Runs) -> None:
    run = runs.empty("ema")
    train_generation(run, job_of(runs, {"emaDecay": 0.9}, "float32"), Layout(2, 1))
    state = committed_state(run, STEPS)
    for folder, kind in (("export", "fp32"), ("export-ema", "ema")):
        for name, found in exported(run, folder).items():
            assert torch.equal(found, state[f"{name}/{kind}"])
        AutoModelForCausalLM.from_pretrained(run.root / folder)
    assert exported(run, "export").keys() == exported(run, "export-ema").keys()
    assert any(not torch.equal(state[f"{name}/fp32"], state[f"{name}/ema"]) for name in exported(run, "export"))


@pytest.mark.long
def test_the_moving_average_of_an_adapter_is_exported(runs: Runs) -> None:
    adapter = {"lora": {"r": 4, "targetModules": ["q_proj", "v_proj"]}}
    job = runs.job("causal", training={"emaDecay": 0.9}, adapter=adapter)
    run = runs.empty("ema-adapter")
    train_generation(run, job, Layout(2, 1))
    whole, average = exported(run, "export"), exported(run, "export-ema")
    assert whole.keys() == average.keys()
    assert {name.rsplit(".", 2)[1] for name in whole if not torch.equal(whole[name], average[name])} == {
        *("q_proj", "v_proj")
    }
