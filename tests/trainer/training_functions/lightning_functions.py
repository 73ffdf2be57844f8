"""Training functions of the tests that use Lightning. Ranks import them, as `lightning_functions:NAME`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from library_functions import die  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import spotune_train

ROWS = 44


def trains(config: dict[str, Any]) -> None:
    """A network with dropout, a shuffled loader, accumulated gradients, and validation that changes the learning rate.

    `package` hides the other package of Lightning; `samples` takes our samples in place of a loader.
    """
    if config.get("package") == "pytorch_lightning":
        sys.modules["lightning"] = None  # type: ignore[assignment]
        import pytorch_lightning as pl
    else:
        import lightning.pytorch as pl  # type: ignore[no-redef]
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    from spotune_train.lightning import SpotuneCallback

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = torch.stack(batch[1]) if config.get("samples") else batch[0]
            loss = mse_loss(self.layers(rows), rows.sum(dim=1, keepdim=True))
            self.log("rows", rows.sum())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("valLoss", mse_loss(self.layers(batch[0]), batch[0].sum(dim=1, keepdim=True)), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "valLoss"}}

    class Killed(SpotuneCallback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any, **options: Any) -> None:
            super().on_train_batch_end(trainer, *arguments, **options)
            die(trainer.global_step, config)

    torch.manual_seed(1)
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3))
    held_out = DataLoader(TensorDataset(rows[:6]), batch_size=3)
    loader: Any = DataLoader(TensorDataset(rows), batch_size=2, shuffle=True, num_workers=config.get("processes", 0))
    if config.get("samples"):
        loader = spotune_train.samples(rows, 4, epochs=config["epochs"])
    trainer = pl.Trainer(
        max_epochs=1 if config.get("samples") else config["epochs"],
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],  # type: ignore[list-item]
        callbacks=[Killed(every_n_steps=config["every"])],  # type: ignore[list-item]
        accumulate_grad_batches=config.get("accumulate", 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer).fit(Model(), loader, held_out, ckpt_path=SpotuneCallback.checkpoint())
