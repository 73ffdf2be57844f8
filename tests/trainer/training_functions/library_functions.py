"""Training functions of the tests that use `spotune_train`. Ranks import them, as `library_functions:NAME`."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import spotune_train
from spotune_train.transformers import SpotuneCallback
from spotune_trainer.training_functions.checkpoints import FolderCheckpoints
from spotune_trainer.training_functions.session import Session, current_session

ROWS = 37


def die(step: int, config: dict[str, Any]) -> None:
    """End rank 1 after a step, in the first generation only: a file says that it has happened."""
    happened = Path(config.get("happened", "/nonexistent"))
    if step == config.get("killAt") and distributed.get_rank() == 1 and not happened.exists():
        happened.touch()
        session = current_session()
        assert session is not None
        wait_for_commit(session)
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_commit(session: Session) -> None:
    """Wait until the checkpoint that is copied in the background is durable, on all ranks."""
    while (commit := session._running_commit) is not None and not commit.has_ended:
        time.sleep(0.01)


def _rows() -> list[torch.Tensor]:
    return list(torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3)))


def trains(config: dict[str, Any]) -> None:
    """A line through made rows: gradients are averaged over the workers, and each `every` steps are saved."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if (checkpoint := spotune_train.checkpoint.latest()) is not None:
        state = checkpoint.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    samples = spotune_train.samples(_rows(), 5, seed=2, epochs=config["epochs"])
    steps_done: list[int] = []
    if config.get("commitsWait"):
        assert samples.total_steps is not None
        _let_commits_wait(steps_done, samples.total_steps)
    for step, rows in samples:
        batch = torch.stack(rows) if rows else torch.zeros(0, 4)
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        spotune_train.report(step, loss.detach(), total_steps=samples.total_steps, ids=sum(samples.sample_ids(step)))
        steps_done.append(step)
        die(step, config)
        if step % config["every"] == 0 or step == samples.total_steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            spotune_train.checkpoint.save(step, state)
    if config.get("again"):
        spotune_train.checkpoint.save(step, {"other": 1})


def _let_commits_wait(steps_done: list[int], last: int) -> None:
    """Each commit waits until training has made another step, except for that of the last one."""
    commit: Any = FolderCheckpoints.commit

    def wait_and_commit(checkpoints: FolderCheckpoints, step: int, *arguments: Any) -> Any:
        deadline = time.monotonic() + 30
        while step < last and step + 1 not in steps_done:
            assert time.monotonic() < deadline, f"training waits while the checkpoint of step {step} is copied"
            time.sleep(0.01)
        return commit(checkpoints, step, *arguments)

    FolderCheckpoints.commit = wait_and_commit  # type: ignore[method-assign, assignment]


def _slow_down_commits() -> None:
    """The first file of each commit takes half a second."""
    write: Any = FolderCheckpoints._write

    def slow(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write(*arguments)

    FolderCheckpoints._write = slow  # type: ignore[method-assign, assignment]


def shards(config: dict[str, Any]) -> None:
    """FSDP2 over all workers; the state after `steps` steps is saved as shards, and once as a whole by rank 0."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state: dict[str, Any] = model.state_dict()
    step = 0
    if (checkpoint := spotune_train.checkpoint.latest()) is not None:
        checkpoint.load_into(state)
        model.load_state_dict(state)
        step = checkpoint.step
    while step < config["steps"]:
        step += 1
        loss = mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        spotune_train.report(step, loss.detach())
        state = model.state_dict()
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(whole, Path(folder) / "whole.pt")
            spotune_train.checkpoint.save(step, state, {"whole.pt": Path(folder) / "whole.pt"})
        die(step, config)


def reports_backwards(config: dict[str, Any]) -> None:
    spotune_train.report(3, 1.0)
    spotune_train.report(config["step"], 1.0)


def saves_backwards(config: dict[str, Any]) -> None:
    spotune_train.report(3, 1.0)
    spotune_train.checkpoint.save(2, {})


def reports_on_one_rank_and_saves_on_the_other(config: dict[str, Any]) -> None:
    if distributed.get_rank() == 0:
        spotune_train.report(1, 1.0)
    else:
        spotune_train.checkpoint.save(1, {})


def saves_two_files_of_one_name(config: dict[str, Any]) -> None:
    spotune_train.checkpoint.save(1, {}, {"state.pt": __file__})


def saves_a_file_outside(config: dict[str, Any]) -> None:
    spotune_train.checkpoint.save(1, {}, {"../outside": __file__})


def loads_what_it_did_not_save(config: dict[str, Any]) -> None:
    spotune_train.checkpoint.save(1, files={"file": __file__}, wait=True)
    found = spotune_train.checkpoint.latest()
    assert found is not None
    found.load()


def saves_until_superseded(config: dict[str, Any]) -> None:
    for step in range(1, 100_000):
        spotune_train.checkpoint.save(step, {"step": step})


def fails_while_a_checkpoint_is_copied(config: dict[str, Any]) -> None:
    _slow_down_commits()
    spotune_train.checkpoint.save(1, {"step": 1})
    raise ValueError("a batch is empty")


def leaves_at_a_notice(config: dict[str, Any]) -> None:
    """Saves only at a notice."""
    for step in range(1, 1_000_000):
        spotune_train.report(step)
        if spotune_train.notice() is not None:
            spotune_train.checkpoint.save(step, {"step": step})


def hangs_after_the_last_step(config: dict[str, Any]) -> None:
    for step in (1, 2):
        spotune_train.report(step)
    spotune_train.checkpoint.save(2, {"step": 2}, wait=True)
    session = current_session()
    assert session is not None
    watchdog = session._reporter._watchdog
    assert watchdog._timeout_seconds == config["hangSeconds"]
    watchdog._timeout_seconds, watchdog._last_reset = 1.0, -math.inf  # what comes before may take longer
    watchdog.reset()
    time.sleep(600.0)


def trains_by_transformers(config: dict[str, Any]) -> None:
    """Hugging Face's Trainer with a tiny BERT and made rows."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    random = torch.Generator().manual_seed(2)
    rows = [
        {"input_ids": torch.randint(32, (8,), generator=random), "labels": torch.tensor(number % 2)}
        for number in range(48)
    ]

    class Killed(SpotuneCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> Any:
            control = super().on_step_end(*arguments, **options)
            die(arguments[1].global_step, config)
            return control

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            save_steps=4,
            logging_steps=2,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Killed()])
        trainer.train(resume_from_checkpoint=SpotuneCallback.checkpoint())
