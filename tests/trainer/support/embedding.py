"""Jobs that learn embeddings: a small corpus of queries and texts, its shards, and a small encoder or decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import BertConfig

from spotune.job import FinetuneJob
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.models.pretrained import load_tokenizer
from tests.trainer.support.preference import BATCH, EPOCHS, PAIRS, STEPS, samples_of_steps
from tests.trainer.support.tiny import VOCABULARY, make_job, save_source, save_tokenizer

Kind = Literal["encoder", "decoder"]

_SUBJECTS = ("singer", "ship", "film", "stadium", "city", "river", "song", "car")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def embedding_rows(count: int = PAIRS) -> list[dict[str, str]]:
    """Questions with the query that answers them, and another query about the same subject, all of uneven lengths."""
    rows = []
    for number in range(count):
        subject, which = _SUBJECTS[number % 8], _NUMBERS[number // 8 % 8]
        rows.append(
            {
                "query": f"how many {subject}s have number {which} ? " + "please " * (number % 4),
                "positive": f"SELECT count(*) FROM {subject} WHERE number = {which}" + " AND age > 30" * (number % 3),
                "negative": f"SELECT name FROM {subject} LIMIT {number % 7}",
            }
        )
    return rows


def save_embedding_source(folder: Path, kind: Kind, dropout: float = 0.0) -> Path:
    """Save configuration and tokenizer of a small encoder, or decoder without dropout; returns the folder."""
    if kind == "decoder":
        return save_source(folder, "causal", attention_dropout=0.0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def embedding_job(
    root: Path, kind: Kind = "encoder", *, negatives: bool = False, dropout: float = 0.0, **sections: Any
) -> FinetuneJob:
    """A job that trains on `embedding_rows` for `STEPS` steps; its shards and model are written to `root`.

    Args:
        root: a folder.
        kind: encoder with the mean of its outputs, or decoder with that of the last token.
        negatives: whether rows have a hard negative.
        dropout: of the encoder.
        sections: of the spec, merged over its values.
    """
    source = root / "model"
    if not source.exists():
        save_embedding_source(source, kind, dropout)
    (root / "texts.jsonl").write_text("\n".join(map(json.dumps, embedding_rows())) + "\n")
    names = ("query", "positive", *(["negative"] if negatives else []))
    columns = {name: f"{{{name}}}" for name in names} | {"maxLength": 48}
    dataset = {"train": {"source": str(root / "shards")}, "eval": None, **columns, **sections.pop("dataset", {})}
    training = {
        "objective": "embedding",
        "embedding": {"pooling": "mean" if kind == "encoder" else "lastToken"},
        "epochs": EPOCHS,
        "globalBatchSize": BATCH,
        "learningRate": 3e-3,
        "scheduler": "linear",
        "warmupSteps": 3,
        "seed": 7,
        **sections.pop("training", {}),
    }
    checkpoint = {"every": STEPS, **sections.pop("checkpoint", {})}
    job = make_job(source, "causal", dataset=dataset, training=training, checkpoint=checkpoint, **sections)
    prepare([root / "texts.jsonl"], root / "shards", PrepareOptions.from_job(job), load_tokenizer(job))
    return job


def texts_of_steps(job: FinetuneJob, root: Path) -> list[list[Mapping[str, str]]]:
    """The raw rows of each step, in the order of training."""
    rows, ids = embedding_rows(), samples_of_steps(job, root)
    return [[rows[sample_id] for sample_id in ids[start : start + BATCH]] for start in range(0, len(ids), BATCH)]
