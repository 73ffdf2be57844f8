"""Loss parity with the plain single-process Trainer of transformers: same model, data order, batch and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainingArguments

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.runs import MICRO_BATCH, Layout, Runs, train_generation

pytestmark = pytest.mark.slow

STEPS = 50
BATCH = 15
"""Five micro-batches of three; divides the 75 samples, since the Trainer treats a partial last step differently."""


@pytest.mark.parametrize(("task", "layout"), [("seq2seq", Layout(2, 2)), ("causal", Layout(3, 1))], ids=str)
def test_losses_match_the_transformers_trainer(runs: Runs, tmp_path: Path, task: str, layout: Layout) -> None:
    training = {
        "epochs": STEPS * BATCH // 75,
        "globalBatchSize": BATCH,
        "learningRate": 5e-3,
        "scheduler": "linear",
        "warmupSteps": 5,
        "weightDecay": 0.1,
        "maxGradNorm": 0.5,
    }
    job = runs.job(task, dropout=False, training=training, checkpoint={"every": STEPS})
    directory = runs.empty("parity")
    train_generation(directory, job, layout)
    ours = surviving_steps(directory)
    theirs = trainer_history(runs, job, tmp_path)
    assert len(ours) == len(theirs) == STEPS
    assert [record["loss"] for record in ours] == pytest.approx([entry["loss"] for entry in theirs], abs=1e-4)
    norms = [record["gradNorm"] for record in ours]
    assert norms == pytest.approx([entry["grad_norm"] for entry in theirs], rel=1e-2)
    rates = [record["learningRate"] for record in ours]
    assert rates == pytest.approx([entry["learning_rate"] for entry in theirs])
    assert min(norms) < training["maxGradNorm"] < max(norms), "some steps clip their gradient, others do not"
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"], "the weights moved far enough for a difference to show"


def trainer_history(runs: Runs, job: FinetuneJob, folder: Path) -> list[dict[str, Any]]:
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
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
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
    dataset = ShardedDataset(str(runs.shards(job.spec.model.task)), runs.root / "cache")
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
