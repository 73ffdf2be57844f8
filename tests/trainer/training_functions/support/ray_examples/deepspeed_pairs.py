"""examples/ray-deepspeed with `spotune_train`: exact samples and random numbers, and checkpoints within an epoch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import spotune_train

sys.path.insert(0, str(Path(__file__).parents[5] / "examples" / "ray-deepspeed"))


def by_steps(config: dict[str, Any]) -> None:
    """Train as the example does, one step after the other."""
    import classify
    import deepspeed
    from transformers import set_seed

    set_seed(config["seed"])
    tokenizer = classify.made_tokenizer()
    collate, model = classify.collator(tokenizer), classify.made_model(tokenizer)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=classify.deepspeed_config(config)
    )
    if (checkpoint := spotune_train.checkpoint.latest()) is not None:
        engine.load_checkpoint(str(checkpoint.folder))
    pairs = classify.made_pairs(config["pairs"], config["seed"])
    batch_size = config["batchSize"] * distributed.get_world_size()
    samples = spotune_train.samples(pairs, batch_size, seed=config["seed"], epochs=config["epochs"])
    for step, rows in samples:
        torch.manual_seed(step * 1000 + distributed.get_rank())  # of the dropout
        loss = classify.train_step(engine, collate(rows))
        spotune_train.report(step, loss, total_steps=samples.total_steps)
        if step % config["every"] == 0 or step == samples.total_steps:
            spotune_train.checkpoint.save_with(step, engine.save_checkpoint)
