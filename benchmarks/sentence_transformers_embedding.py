r"""Losses of sentence-transformers, in one process: the reference that our objective embedding is tested against.

    python -m benchmarks.sentence_transformers_embedding \
        --output benchmarks/results/sentence_transformers_embedding.json

It needs the package sentence-transformers, which is no dependency of spotune (`uv pip install --target FOLDER --no-deps
sentence-transformers`, and FOLDER in PYTHONPATH). Rows, model, order and batch are those of the test
tests/trainer/journeys/test_embedding.py. It also loads an export of each job's model by sentence-transformers, and
writes how far its embeddings are from ours. Model, pooling and loss (MultipleNegativesRankingLoss) are those of
sentence-transformers; optimizer, schedule and clipping are those that its Trainer uses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import get_scheduler

from spotune.job import FinetuneJob
from spotune_trainer.data.batches import collate
from spotune_trainer.export.huggingface import export_model
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from spotune_trainer.objectives.embedding import embed
from tests.provenance import commit
from tests.trainer.support.embedding import embedding_job, embedding_rows, texts_of_steps
from tests.trainer.support.preference import STEPS

JOBS: dict[str, dict[str, Any]] = {
    "encoder": {"kind": "encoder"},
    "encoder-negatives": {"kind": "encoder", "negatives": True},
    "decoder": {"kind": "decoder"},
}
"""Arguments of `embedding_job`, by the name that the test gives them."""


def step_losses(job: FinetuneJob, root: Path) -> list[float]:
    """The loss of each step of sentence-transformers, with its batch equal to our global batch."""
    training, dataset = job.spec.training, job.spec.dataset
    start = root / "start"
    build_model(job).save_pretrained(start)
    load_tokenizer(job).save_pretrained(start)
    transformer = Transformer(str(start), max_seq_length=dataset.max_length)
    pooling = Pooling(transformer.get_embedding_dimension(), training.embedding.pooling.lower())
    model = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    loss_function = MultipleNegativesRankingLoss(model, scale=1 / training.embedding.temperature)
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate, weight_decay=training.weight_decay)
    schedule = get_scheduler(training.scheduler, optimizer, training.warmup_steps, STEPS)
    model.train()
    losses = []
    for rows in texts_of_steps(job, root):
        names = ["query", "positive", *(["negative"] if dataset.negative else [])]
        features = [model.preprocess([row[name] for row in rows]) for name in names]
        loss = loss_function(features, None)
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def export_difference(job: FinetuneJob, root: Path) -> float:
    """Largest difference of an element, between embeddings of an export by sentence-transformers and ours."""
    model, tokenizer, embedding = build_model(job).eval(), load_tokenizer(job), job.spec.training.embedding
    export_model(dict(model.named_parameters()), job, root / "export", {})
    loaded = SentenceTransformer(str(root / "export"), device="cpu")
    texts = [row["query"] for row in embedding_rows()]
    encoded = tokenizer(texts, truncation=True, max_length=job.spec.dataset.max_length)["input_ids"]
    rows = [{"input_ids": np.array(ids), "text_lengths": np.array([len(ids)])} for ids in encoded]
    batch = collate(rows, "causal", tokenizer.pad_token_id)
    with torch.no_grad():
        ours = embed(model, batch, embedding.pooling, normalize=embedding.normalize)
    return float(abs(loaded.encode_query(texts, convert_to_tensor=True) - ours).max())


def main() -> None:
    """Write the losses of all jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    losses, differences = {}, {}
    for name, arguments in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            job = embedding_job(Path(folder), **arguments)
            losses[name] = step_losses(job, Path(folder))
            differences[name] = export_difference(job, Path(folder))
    versions = {module.__name__: module.__version__ for module in (sentence_transformers, transformers, torch)}
    output.write_text(
        json.dumps(
            {"commit": commit(), "versions": versions, "losses": losses, "exportDifferences": differences}, indent=1
        )
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
