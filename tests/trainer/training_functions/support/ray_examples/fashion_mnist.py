"""Ray's example "Train a PyTorch model on Fashion MNIST", with made images, and a checkpoint after each epoch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spotune_train

SIDE, CLASSES = 28, 10


def made_images(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=random)
    return TensorDataset(patterns[labels] + 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=random), labels)


class NeuralNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(
            nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, CLASSES), nn.ReLU()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear_relu_stack(self.flatten(inputs))
        return logits


def train_func_per_worker(config: dict[str, Any]) -> None:
    """The function of Ray's example."""
    batch_size = config["batch_size_per_worker"]
    train_dataloader = DataLoader(made_images(256, 1), batch_size=batch_size, shuffle=True)
    test_dataloader = DataLoader(made_images(64, 2), batch_size=batch_size)
    train_dataloader = ray.train.torch.prepare_data_loader(train_dataloader)
    test_dataloader = ray.train.torch.prepare_data_loader(test_dataloader)
    model = NeuralNetwork()
    start_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "model.pt", weights_only=True)
        model.load_state_dict(state["model"])
        start_epoch = state["epoch"]
    model = ray.train.torch.prepare_model(model)  # type: ignore[assignment]
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for epoch in range(start_epoch, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            train_dataloader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        model.train()
        for inputs, labels in train_dataloader:
            loss = loss_fn(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, correct, total = 0.0, 0, 0
        with torch.no_grad():
            for inputs, labels in test_dataloader:
                predicted = model(inputs)
                test_loss += loss_fn(predicted, labels).item()
                total += len(labels)
                correct += int((predicted.argmax(1) == labels).sum().item())
        metrics = {"loss": test_loss / len(test_dataloader), "accuracy": correct / total}
        with tempfile.TemporaryDirectory() as folder:
            reported = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {
                    "model": model.module.state_dict(),  # type: ignore[union-attr]
                    "epoch": epoch + 1,
                }
                torch.save(state, Path(folder) / "model.pt")
                reported = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics=metrics, checkpoint=reported)


def by_steps(config: dict[str, Any]) -> None:
    """The same with `spotune_train`: exact samples and random numbers, and checkpoints within an epoch."""
    torch.manual_seed(1)
    model = NeuralNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    if (checkpoint := spotune_train.checkpoint.latest()) is not None:
        state = checkpoint.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel = ray.train.torch.prepare_model(model)
    loss_fn = nn.CrossEntropyLoss()
    samples = spotune_train.samples(made_images(256, 1), 2 * config["batch_size_per_worker"], epochs=config["epochs"])
    for step, rows in samples:
        torch.manual_seed(step * 1000 + ray.train.get_context().get_world_rank())  # of the dropout
        loss = loss_fn(parallel(torch.stack([image for image, _ in rows])), torch.stack([label for _, label in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spotune_train.report(step, loss.detach(), total_steps=samples.total_steps)
        if step % config["every"] == 0 or step == samples.total_steps:
            spotune_train.checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
