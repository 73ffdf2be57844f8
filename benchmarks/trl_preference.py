"""Losses of TRL's preference trainers, in one process: the reference that our objectives are tested against.

    python -m benchmarks.trl_preference --output benchmarks/results/trl_preference.json

It needs the packages trl and datasets, which are no dependencies of spotune (`uv pip install --target FOLDER --no-deps
trl datasets pyarrow pandas dill multiprocess xxhash fsspec`, and FOLDER in PYTHONPATH). Rows, model, order and batch
are those of the test tests/trainer/journeys/test_preference.py. TRL computes the reference model beside the policy.
Its KTO pairs each prompt with the answer of the row before it in the batch. Here it gets the pairs of our shards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import torch
import transformers
import trl
from tokenizers.processors import TemplateProcessing
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from spotune.job import FinetuneJob
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from tests.provenance import commit
from tests.trainer.support.preference import BATCH, PAIRS, STEPS, preference_job, rows_of_steps, samples_of_steps

OBJECTIVES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.1}),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.1}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"beta": 0.1, "desirable_weight": 0.75, "undesirable_weight": 1.5}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
}


def step_losses(job: FinetuneJob, objective: str, root: Path) -> list[float]:
    """The loss of each step of TRL's trainer, with its batch equal to our global batch."""
    trainer_class, config_class, options = OBJECTIVES[objective]
    training = job.spec.training
    tokenizer = load_tokenizer(job)
    # It ends every text with EOS. TRL adds EOS to answers itself, and prompts have none.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    rows = [dict(row) for row in rows_of_steps(job, root)]
    arguments = config_class(
        output_dir=str(root / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.scheduler,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_length=job.spec.dataset.max_length,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=training.seed,
        **options,
    )

    trainer = trainer_class(
        model=build_model(job),
        **({"ref_model": build_model(job)} if objective in ("dpo", "kto") else {}),
        args=arguments,
        train_dataset=datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint=objective),
        processing_class=tokenizer,
    )
    if objective == "kto":
        trainer.train_dataset = with_our_mismatched_answers(trainer.train_dataset, samples_of_steps(job, root))
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def recorded(*positional: Any, **named: Any) -> Any:
        loss = compute_loss(*positional, **named)
        losses.append(float(loss))  # the Trainer's own log rounds it
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    return losses


def with_our_mismatched_answers(dataset: datasets.Dataset, sample_ids: list[int]) -> datasets.Dataset:
    """TRL's dataset with the mismatched answers of our shards: those of the next row, after the last one the first."""
    assert len(dataset) == len(sample_ids), "TRL dropped rows"
    answers = dict(zip(sample_ids, dataset["completion_ids"], strict=True))
    mismatched = [answers[(sample_id + 1) % PAIRS] for sample_id in sample_ids]
    return dataset.remove_columns("KL_completion_ids").add_column("KL_completion_ids", mismatched)


def main() -> None:
    """Write the losses of all objectives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    losses = {}
    for objective in OBJECTIVES:
        with tempfile.TemporaryDirectory() as folder:
            losses[objective] = step_losses(preference_job(Path(folder), objective), objective, Path(folder))
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    output.write_text(
        json.dumps({"commit": commit(), "versions": versions, "losses": losses}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
