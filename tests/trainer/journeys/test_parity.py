"""Loss parity with the plain single-process Trainer of transformers: same model, data order, batch and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from streaming.base.format.mds import MDSWriter
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainingArguments

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.runs import MICRO_BATCH, Layout, Runs, losses, train_generation
from tests.trainer.support.tiny import VOCABULARY

pytestmark = pytest.mark.slow

STEPS = 50
BATCH = 15
"""Five micro-batches of three; divides the 75 samples, since the Trainer treats a partial last step differently."""


TRAINING = {
    "epochs": STEPS * BATCH // 75,
    "globalBatchSize": BATCH,
    "learningRate": 5e-3,
    "scheduler": "linear",
    "warmupSteps": 5,
    "weightDecay": 0.1,
    "maxGradNorm": 0.5,
}


@pytest.mark.parametrize(("task", "layout"), [("seq2seq", Layout(2, 2)), ("causal", Layout(3, 1))], ids=str)
def test_losses_match_the_transformers_trainer(runs: Runs, tmp_path: Path, task: str, layout: Layout) -> None:
    job = runs.job(task, dropout=False, training=TRAINING, checkpoint={"every": STEPS})
    directory = runs.empty("parity")
    train_generation(directory, job, layout)
    ours = surviving_steps(directory)
    theirs = trainer_history(runs, job, tmp_path, Trainer)
    assert len(ours) == len(theirs) == STEPS
    assert [record["loss"] for record in ours] == pytest.approx([entry["loss"] for entry in theirs], abs=1e-4)
    norms = [record["gradNorm"] for record in ours]
    assert norms == pytest.approx([entry["grad_norm"] for entry in theirs], rel=1e-2)
    rates = [record["learningRate"] for record in ours]
    assert rates == pytest.approx([entry["learning_rate"] for entry in theirs])
    assert min(norms) < TRAINING["maxGradNorm"] < max(norms), "some steps clip their gradient, others do not"
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"], "the weights moved far enough for a difference to show"


@pytest.mark.long
def test_losses_with_noise_on_embeddings_match_the_transformers_trainer(runs: Runs, tmp_path: Path) -> None:
    """Of rows without padding, which the Trainer counts for the scale of the noise."""
    shards = tmp_path / "shards"
    write_rows_of_one_length(shards)
    job = runs.job(
        "causal",
        dropout=False,
        dataset={"train": {"source": str(shards)}},
        training={**TRAINING, "neftuneNoiseAlpha": 15.0},
        checkpoint={"every": STEPS},
    )
    directory = runs.empty("noisy-parity")
    train_generation(directory, job, Layout(3, 1))
    theirs = [entry["loss"] for entry in trainer_history(runs, job, tmp_path, SeededTrainer)]
    assert losses(directory) == pytest.approx(theirs, abs=1e-4)
    differently_seeded = [entry["loss"] for entry in trainer_history(runs, job, tmp_path, Trainer)]
    assert losses(directory) != pytest.approx(differently_seeded, abs=1e-3), "the noise is large enough to show"


def write_rows_of_one_length(folder: Path) -> None:
    """Write 75 rows of 24 random tokens, the last 10 of them with labels."""
    random = np.random.default_rng(11)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh3_64"]) as writer:
        for _ in range(75):
            tokens = random.integers(3, VOCABULARY, 24, dtype=np.int32)
            labels = np.where(np.arange(24) < 14, -100, tokens).astype(np.int32)
            writer.write({"input_ids": tokens, "labels": labels})


class SeededTrainer(Trainer):
    """Seeds each micro-batch by (seed, step, number of the micro-batch in the step), as spotune does."""

    _micro_batches = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        step, micro_batch = divmod(self._micro_batches, BATCH // MICRO_BATCH)
        self._micro_batches += 1
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{self.args.seed}/{step}/{micro_batch}".encode()) >> 1)
        return super().compute_loss(*args, **kwargs)


def trainer_history(runs: Runs, job: FinetuneJob, folder: Path, trainer_class: type[Trainer]) -> list[dict[str, Any]]:
    """Loss, gradient norm and learning rate of every step of transformers' Trainer."""
    training = job.spec.training
    model = build_model(job)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=BATCH // MICRO_BATCH,
        train_sampling_strategy="sequential",
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.scheduler,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        neftune_noise_alpha=training.neftune_noise_alpha or None,
        seed=training.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=rows_in_order(runs, job),
        data_collator=Collator(model),
        # Normalizes by the tokens of the whole step; the loss of T5 itself is the mean of each micro-batch.
        compute_loss_func=token_mean if model.config.is_encoder_decoder else None,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def rows_in_order(runs: Runs, job: FinetuneJob) -> Any:
    """Rows of all steps, in the order of training."""
    assert job.spec.dataset.train is not None
    dataset = ShardedDataset(job.spec.dataset.train.source, runs.root / "cache")
    schedule = SampleSchedule(dataset.shard_sizes, BATCH, job.spec.training.seed)
    return [dataset[i] for step in range(STEPS) for i in schedule.sample_ids(step).tolist()]


class Collator:
    """Pads rows on the right; uses no code of the trainer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        inputs = [torch.tensor(row["input_ids"], dtype=torch.int64) for row in rows]
        labels = [torch.tensor(row["labels"], dtype=torch.int64) for row in rows]
        batch = {
            "input_ids": pad_sequence(inputs, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }
        if self.model.config.is_encoder_decoder:
            model: Any = self.model
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        return batch


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Cross-entropy over the label tokens of a whole step."""
    logits = outputs["logits"]
    summed = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return summed / num_items_in_batch
