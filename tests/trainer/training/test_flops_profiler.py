"""The FLOPs profile: it matches an independent count, is made once in a run, and does not change training."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.flop_counter import FlopCounterMode

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.data.batches import Batch, Task, collate
from spotune_trainer.engine.build import EngineConfig, build_engine
from spotune_trainer.evaluation.ranks import evaluation_mode
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.flops import ModelShape
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from spotune_trainer.training.flops_profiler import FlopsProfile
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, committed_state, losses, train_generation
from tests.trainer.support.tiny import make_job, make_rows, save_source

pytestmark = pytest.mark.slow

ROWS = 4
LORA = {"lora": {"r": 4}}


def profile_of(directory: JobDirectory) -> dict[str, Any]:
    """The profile that a run has written."""
    profile = files.read_json(directory.flops_profile)
    assert isinstance(profile, dict)
    return profile


def build(source: Path, task: Task, stage: int, compiled: bool, adapter: Any) -> tuple[Any, Batch]:
    """An engine over a tiny model, and a batch of four rows."""
    job = make_job(source, task, **({"adapter": adapter} if adapter else {}))
    model = attach_adapter(build_model(job), job)
    batch = collate(make_rows(load_tokenizer(job), task, ROWS), task, 0)
    config = EngineConfig(stage, ROWS, 1, torch.float32, gradient_checkpointing=True, compile=compiled)
    engine = build_engine(model, job.spec.training, config)
    engine.train()
    return engine, batch


def profile_rank(
    rank: int, world_size: int, root: Path, source: Path, task: Task, stage: int, compiled: bool, adapter: Any
) -> int:
    """Profile an engine before its first step. Returns the FLOPs that PyTorch counts in a forward pass."""
    engine, batch = build(source, task, stage, compiled, adapter)
    profile = FlopsProfile(JobDirectory(root), 3, rank, distributed.group.WORLD)
    assert [profile.is_due(step) for step in (2, 3, 4)] == [False, True, True]
    with FlopCounterMode(display=False) as counter, evaluation_mode(engine.module):
        summed_loss(engine.module, batch)
    owners = [torch.Tensor, *engine.module.modules()]
    attributes_before = [set(vars(owner)) for owner in owners]
    profile.make(engine, batch, 4)
    assert [set(vars(owner)) for owner in owners] == attributes_before
    assert not profile.is_due(5)
    assert all(module.training for module in engine.module.modules())
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("task", "stage", "compiled", "adapter"),
    [
        ("causal", 0, False, None),
        ("causal", 1, True, None),
        ("causal", 3, True, None),
        ("seq2seq", 2, False, None),
        ("seq2seq", 3, False, None),
        ("causal", 1, False, LORA),
        ("causal", 1, False, LORA | {"quantization": "nf4"}),
    ],
)
def test_forward_flops_match_the_count_of_pytorch(
    task: Task, stage: int, compiled: bool, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = save_source(tmp_path / "source", task)
    directory = JobDirectory(tmp_path / "job")
    directory.root.mkdir()
    counted = run_group(2, profile_rank, directory.root, source, task, stage, compiled, adapter)
    profile = profile_of(directory)
    assert 2 * profile["forwardMacs"] == counted[0]
    assert counted[0] < profile["forwardFlops"] < 1.1 * counted[0]
    job = make_job(source, task, **({"adapter": LORA} if adapter else {}))
    whole = attach_adapter(build_model(job), job)
    assert profile["parameters"] == sum(parameter.numel() for parameter in whole.parameters())
    text = (directory.profile / "flops.txt").read_text()
    assert re.search(r"world size: +2 *\n", text)
    assert "Profile Summary at step 4:" in text
    assert ("LlamaDecoderLayer(" if task == "causal" else "T5Block(") in text


def test_forward_flops_match_the_mfu_formula(tmp_path: Path) -> None:
    """Except for embeddings, which are looked up, and norms, which are no products. The forward pass is a third."""
    source = save_source(tmp_path / "source", "causal")
    model = build_model(make_job(source, "causal"))
    run_group(1, profile_rank, tmp_path, source, "causal", 0, False, None)
    profile = profile_of(JobDirectory(tmp_path))
    rows, width = profile["rows"], profile["sequence"]
    idle = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or "embed_tokens" in name)
    formula = ModelShape.from_model(model).flops(rows, width) / 3 - rows * width * 2 * idle
    assert (profile["step"], rows, profile["parameters"]) == (4, ROWS, ModelShape.from_model(model).parameters)
    assert 2 * profile["forwardMacs"] == formula


@pytest.mark.parametrize(("stage", "compiled"), [(3, False), pytest.param(1, True, marks=pytest.mark.long)])
def test_profiling_does_not_change_training(runs: Runs, stage: int, compiled: bool) -> None:
    layout = Layout(world_size=2, zero_stage=stage)
    execution = {"compile": compiled}
    plain, profiled = runs.empty("plain"), runs.empty("profiled")
    train_generation(plain, runs.job("causal", execution=execution), layout, micro_batch_size=6, timeout=400)
    job = runs.job("causal", execution=execution | {"flopsProfile": 3})
    train_generation(profiled, job, layout, micro_batch_size=6, timeout=400)
    assert losses(profiled) == losses(plain)
    expected, found = committed_state(plain, 10), committed_state(profiled, 10)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (profile_of(profiled)["step"], profile_of(profiled)["rows"]) == (3, 6)


def test_restarted_run_is_not_profiled_again(runs: Runs) -> None:
    layout, job = Layout(1, 0), runs.job(execution={"flopsProfile": 3})
    first = runs.empty("finished-once")
    train_generation(first, job, layout)
    again = runs.interrupted(first, step=5)
    before = again.flops_profile.stat()
    train_generation(again, job, layout)
    assert again.flops_profile.stat() == before
    assert losses(again) == losses(runs.finished(layout))


def test_profile_requested_for_a_past_step_is_made_at_the_next_start(runs: Runs) -> None:
    layout = Layout(1, 0)
    resumed = runs.interrupted(runs.finished(layout), step=5)
    assert not resumed.profile.exists()
    train_generation(resumed, runs.job(execution={"flopsProfile": 2}), layout)
    assert profile_of(resumed)["step"] == 6
    assert losses(resumed) == losses(runs.finished(layout))


def profile_messages(rank: int, world_size: int, root: Path, source: Path, unknown_call: bool) -> str:
    """Profile into a folder. Returns the log lines or the error.

    With `unknown_call` the model calls a function in a way that the profiler cannot count.
    """
    engine, batch = build(source, "causal", 0, False, None)
    if unknown_call:
        engine.module.register_forward_hook(
            lambda *_: torch.bmm(torch.ones(1, 1, 1), mat2=torch.ones(1, 1, 1)) and None
        )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spotune.worker").addHandler(handler)
    try:
        FlopsProfile(JobDirectory(root), 1, rank, distributed.group.WORLD).make(engine, batch, 1)
    except JobError as error:
        return str(error)
    return "\n".join(lines)


def test_model_that_cannot_be_profiled_is_a_job_error_that_names_the_field(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "causal")
    [message] = run_group(1, profile_messages, tmp_path, source, True)
    assert message.startswith("execution.flopsProfile: DeepSpeed's flops profiler cannot count this model (TypeError: ")


def test_profile_that_cannot_be_written_is_logged_and_raises_nothing(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "causal")
    (tmp_path / "profile").write_text("in the way")
    [message] = run_group(1, profile_messages, tmp_path, source, False)
    assert "the profile of step 1 cannot be written" in message
