"""Ray's example of Lightning, with made images and a small network in place of a ResNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import ray.train.lightning
import torch
from ray_examples.fashion_mnist import NeuralNetwork, made_images  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spotune_train.lightning import SpotuneCallback


class ImageClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = NeuralNetwork()
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor) -> Any:
        return self.model(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss: Tensor = self.criterion(self(inputs), labels)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=0.001)


def train_func(config: dict[str, Any]) -> None:
    """The function of Ray's example."""
    train_dataloader = DataLoader(made_images(256, 1), batch_size=32, shuffle=True)
    model = ImageClassifier()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="cpu",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[ray.train.lightning.RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            path = Path(folder) / "checkpoint.ckpt"
            trainer.fit(model, train_dataloaders=train_dataloader, ckpt_path=path)
    else:
        trainer.fit(model, train_dataloaders=train_dataloader)


def by_steps(config: dict[str, Any]) -> None:
    """The same with one callback of `spotune_train` in place of that of Ray: exact, and within an epoch."""
    pl.seed_everything(1)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="cpu",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[SpotuneCallback(every_n_steps=config["every"])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    train_dataloader = DataLoader(made_images(256, 1), batch_size=32, shuffle=True)
    trainer.fit(ImageClassifier(), train_dataloaders=train_dataloader, ckpt_path=SpotuneCallback.checkpoint())
