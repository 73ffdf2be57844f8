"""A small Llama that counts, trained by the trainer in a minute or two. Its greedy and its sampled text vary.

In a text that repeats itself, a lost or repeated token would not be noticed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from streaming.base.format.mds import MDSWriter

from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import Layout, train_generation
from tests.trainer.support.tiny import make_job, save_config, save_tokenizer

PROMPTS = 250
_NUMBERS = 100
"""How far a row counts."""
_STEPS = 600
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_SECONDS_TO_TRAIN = 1800.0


def prompt(number: int) -> str:
    """The text that the model was trained to continue."""
    return f"count from {number} :"


def train(folder: Path) -> Path:
    """Train the model in an empty folder; returns the folder of its export."""
    source, shards = folder / "source", folder / "shards"
    source.mkdir(parents=True)
    save_config(source, "causal", **_SIZES)
    tokenizer = save_tokenizer(source)
    with MDSWriter(out=str(shards), columns={"input_ids": "ndarray:int32", "labels": "ndarray:int32"}) as writer:
        for number in range(PROMPTS):
            asked = tokenizer(prompt(number))["input_ids"][:-1]
            answer = tokenizer("".join(f" {n}" for n in range(number, number + _NUMBERS)))["input_ids"]
            row = {"input_ids": [*asked, *answer], "labels": [-100] * len(asked) + answer}
            writer.write({name: np.array(ids, dtype=np.int32) for name, ids in row.items()})
    training = {"epochs": None, "maxSteps": _STEPS, "globalBatchSize": 16, "learningRate": 5e-3}
    job = make_job(
        source,
        "causal",
        dataset={"train": {"source": str(shards)}, "eval": None},
        training=training,
        execution={"microBatchSize": 16, "zeroStage": 1},
    )
    directory = JobDirectory(folder / "run")
    directory.root.mkdir()
    train_generation(directory, job, Layout(1, 1), micro_batch_size=16, timeout=_SECONDS_TO_TRAIN)
    return directory.export


def trained_once(folder: Path) -> Path:
    """The folder of the export; trained if it does not exist."""
    export = JobDirectory(folder / "run").export
    if not (export / "model.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)
        train(folder)
    return export


if __name__ == "__main__":
    sys.stdout.write(f"{trained_once(Path(sys.argv[1]))}\n")
