"""Losses of transformers' Trainer on the rows of a job with labels, in this process: what ours are compared with.

Rows become tokens as in transformers' examples run_classification.py and run_ner.py, not by our code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from spotune.job import FinetuneJob
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from tests.trainer.support.labelled import BATCH, STEPS, rows_of_steps


class RecordingTrainer(Trainer):
    """Takes rows in their order, and keeps the loss of each step, which the Trainer's own log rounds."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[float] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(rows)

    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        loss: Any = super().compute_loss(*positional, **named)
        self.losses.append(float(loss.detach()))
        return loss


def trainer_losses(job: FinetuneJob, root: Path) -> list[float]:
    """The loss of each step, with a batch equal to the job's global batch.

    Args:
        job: from `labelled_job`.
        root: the folder of the job.
    """
    training, tokenizer = job.spec.training, load_tokenizer(job)
    words = training.objective == "tokenClassification"
    encode = _encode_words if words else _encode_text
    collator: Any = DataCollatorForTokenClassification if words else DataCollatorWithPadding
    model: Any = build_model(job)
    arguments = TrainingArguments(
        output_dir=str(root / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.scheduler,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        label_smoothing_factor=training.label_smoothing,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=training.seed,
    )
    with torch.random.fork_rng(devices=[]):
        trainer = RecordingTrainer(
            model=model,
            args=arguments,
            train_dataset=[encode(tokenizer, row, job.spec.dataset.labels) for row in rows_of_steps(job, root)],
            data_collator=collator(tokenizer),
        )
        trainer.train()
    return trainer.losses


def _encode_text(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], labels: list[str]) -> dict[str, Any]:
    return {**tokenizer(row["text"]), "label": labels.index(row["label"])}


def _encode_words(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], labels: list[str]) -> dict[str, Any]:
    encoded = tokenizer(row["tokens"], is_split_into_words=True)
    found, before = [], None
    for word in encoded.word_ids():
        found.append(-100 if word is None or word == before else labels.index(row["tags"][word]))
        before = word
    return {**encoded, "labels": found}
