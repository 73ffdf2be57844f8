"""A training function for Ray Train: a small network learns to tell ten kinds of images apart.

It is PyTorch and Ray Train alone, and runs under Ray's own `TorchTrainer` as well. The images are made here, so that
nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import prepare_data_loader, prepare_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
SIDE = 14


def made_images(count: int, seed: int) -> TensorDataset:
    """Images of one pattern for each class, with noise: fp32 ``[count, 1, SIDE, SIDE]`` and int64 ``[count]``."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=random)
    return TensorDataset(patterns[labels] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=random), labels)


def network() -> nn.Module:
    """A convolution and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * (SIDE // 2) ** 2, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def train(config: dict[str, Any]) -> None:
    """Train, with a checkpoint after each epoch. Every worker calls this.

    Args:
        config: `epochs`, `images`, `batchSize` of a worker, `learningRate` and `seed`.
    """
    torch.manual_seed(config["seed"])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learningRate"], momentum=0.9)
    epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:  # after a loss of workers, training continues here
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    parallel_model = prepare_model(model)
    images = made_images(config["images"], config["seed"])
    loader = prepare_data_loader(DataLoader(images, batch_size=config["batchSize"], shuffle=True))
    while epoch < config["epochs"]:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        else:
            torch.manual_seed(config["seed"] + epoch)  # of the order of this epoch's images
        loss = train_epoch(parallel_model, loader, optimizer)
        epoch += 1
        with tempfile.TemporaryDirectory() as folder:
            reported = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                reported = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=reported)


def train_epoch(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> Tensor:
    """Train on all batches once; returns the loss of the last one."""
    loss = torch.zeros(())
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.detach()
