"""A script of Accelerate as a function: `spotune_train.accelerate` reports, saves and loads."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from ray_examples.fashion_mnist import NeuralNetwork, made_images  # type: ignore[import-not-found]
from torch import nn
from torch.utils.data import default_collate

import spotune_train
from spotune_train.accelerate import SpotuneTracker, load_state, save_state


def main(config: dict[str, Any]) -> None:
    """Train with dropout, whose random numbers Accelerate saves, and continue in the middle of an epoch."""
    samples = spotune_train.samples(made_images(176, 1), 16, epochs=config["epochs"])
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    SpotuneTracker(accelerator, samples.total_steps)
    model = NeuralNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_seed(1, device_specific=True)  # of the dropout
    load_state(accelerator)
    for step, rows in samples:
        images, labels = default_collate(rows)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.detach()}, step=step)
        accelerator.log({"late": step}, step=step)
        if step % config["every"] == 0 or step == samples.total_steps:
            save_state(accelerator, step)
