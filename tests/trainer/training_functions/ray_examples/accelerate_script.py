"""A script of Accelerate as a function: `spotune_train.accelerate` reports, saves and loads."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from ray_examples.fashion_mnist import NeuralNetwork, made_images
from torch import nn
from torch.utils.data import DataLoader

from spotune_train.accelerate import SpotuneTracker, load_state, save_state


def main(config: dict[str, Any]) -> None:
    """Train with a shuffled loader and dropout, and continue in the middle of an epoch."""
    set_seed(1)
    loader = DataLoader(made_images(176, 1), batch_size=8, shuffle=True)
    total_steps = config["epochs"] * 11
    accelerator = Accelerator(
        cpu=True,
        log_with=[SpotuneTracker(total_steps)],
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerator.init_trackers("images")
    model = NeuralNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = load_state(accelerator)
    assert len(loader) == 11
    while step < total_steps:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        for images, labels in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            accelerator.log({"loss": loss.detach()}, step=step)
            accelerator.log({"late": step}, step=step)
            if step % config["every"] == 0 or step == total_steps:
                save_state(accelerator, step)
