"""The callback of Lightning: steps are reported, and what Lightning calls a checkpoint is committed."""

from __future__ import annotations

import logging
import math
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotune_train import checkpoint
from spotune_train.lightning.package import lightning_package
from spotune_train.lightning.position import Position
from spotune_train.progress import notice, session
from spotune_train.sampling import Samples

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = lightning_package().Callback

logger = logging.getLogger("spotune.worker")

CHECKPOINT = "lightning.ckpt"
"""File or folder that `Trainer.save_checkpoint` writes."""


class SpotuneCallback(Callback):
    """Reports every optimizer step, and commits Lightning's checkpoint, also at a notice and at the end.

    A checkpoint is not taken where an epoch ends or validation follows, but one step later: what Lightning does there
    is not repeated when training continues.

    Args:
        every_n_steps: optimizer steps between two checkpoints.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ValueError(f"SpotuneCallback: every_n_steps is {every_n_steps}: expected a positive number")
        self._every = every_n_steps
        self._has_deferred = False
        self._reported_step = self._saved_step = 0
        self._total_steps: int | None = None
        self._reported: dict[str, float] = {}

    @staticmethod
    def checkpoint() -> str | None:
        """Path for `Trainer.fit(ckpt_path=...)`; None at the beginning."""
        found = checkpoint.latest()
        return str(found.folder / CHECKPOINT) if found is not None else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow the training dataloader, from the position of the checkpoint on."""
        if stage != "fit":
            return
        found = session("lightning")
        saved = None
        self._reported_step = self._saved_step = found.step
        if (latest := checkpoint.latest()) is not None:
            file = latest.folder / _file_of(found.ranks.rank)
            saved = torch.load(file, weights_only=False) if file.exists() else None  # our own file, verified
        self._position = Position(saved["position"] if saved is not None else None)
        process = trainer.strategy.process_dataloader

        def process_and_follow(loader: object) -> object:
            processed = process(loader)
            return self._position.follow(processed, trainer.current_epoch) if trainer.training else processed

        trainer.strategy.process_dataloader = process_and_follow  # type: ignore[assignment, method-assign]
        if saved is not None and saved["hasStopped"]:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow no more dataloaders."""
        vars(trainer.strategy).pop("process_dataloader", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn how many steps there are."""
        loaders = trainer.train_dataloader
        if isinstance(loaders, list | tuple | dict) and len(loaders) > 1:
            logger.warning("Lightning trains with several dataloaders: after a loss, samples are not exactly the same")
        total = loaders.total_steps if isinstance(loaders, Samples) else trainer.estimated_stepping_batches
        self._total_steps = int(total) if total is not None and 0 < total < math.inf else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Continue with the saved random numbers, where the dataloader has not done so."""
        self._position.restore_random_states()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a step, and save it if that is due or the worker group has to leave."""
        step = trainer.global_step
        if step == self._reported_step:
            return  # gradients are accumulated
        self._reported_step = step
        session("lightning").report(
            self._metrics(trainer, pl_module, outputs), step=step, total_steps=self._total_steps
        )
        if step - self._saved_step < self._every and notice() is None:
            return
        is_boundary = trainer.is_last_batch or _validates_after(trainer, batch_idx)
        if is_boundary and not self._has_deferred:
            self._has_deferred = True
            return
        self._save(trainer, 0 if trainer.is_last_batch else batch_idx + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step: it is the trained model."""
        self._save(trainer, 0)

    def _metrics(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> dict[str, Any]:
        """The loss, and what has been logged since the last report."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found: dict[str, Any] = {name: value for name, value in logged.items() if self._reported.get(name) != value}
        self._reported = logged
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            is_part = pl_module.automatic_optimization  # Lightning has divided it by the number of micro-batches
            found["loss"] = loss.detach() * (trainer.accumulate_grad_batches if is_part else 1)
        return found

    def _save(self, trainer: Trainer, batches: int) -> None:
        self._has_deferred, self._saved_step = False, trainer.global_step
        ended = trainer.should_stop and not batches

        def write(folder: Path) -> None:
            state = {"position": self._position.state(batches), "hasStopped": ended}
            ranks = session("lightning").ranks
            torch.save(state, folder / _file_of(ranks.rank))
            places = ranks.gather((socket.gethostname(), folder))
            written = places[0][1] / CHECKPOINT  # sharding strategies write to the path of rank 0 on each node
            trainer.save_checkpoint(written)
            nodes = [node for node, _ in places]
            if nodes.index(nodes[ranks.rank]) == ranks.rank and ranks.rank > 0 and written.exists():
                shutil.move(written, folder / CHECKPOINT)

        checkpoint.save_with(trainer.global_step, write)


def _file_of(rank: int) -> str:
    return f"lightning-rank-{rank}.pt"


def _validates_after(trainer: Trainer, batch_idx: int) -> bool:
    """Whether validation may follow a batch: at a fraction of the epoch, or every so many batches."""
    every = getattr(trainer, "val_check_batch", None)
    if not every or not math.isfinite(every) or not trainer.enable_validation:
        return False
    return bool((batch_idx + 1) % every == 0 or (trainer.fit_loop.total_batch_idx + 1) % every == 0)
