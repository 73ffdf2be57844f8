r"""Losses of sentence-transformers, in one process: the reference that our objective embedding is tested against.

    python -m benchmarks.sentence_transformers_embedding \
        --output benchmarks/results/sentence_transformers_embedding.json

It needs the package sentence-transformers, which is no dependency of spotune (`uv pip install --target FOLDER --no-deps
sentence-transformers`, and FOLDER in PYTHONPATH). Rows, model, order and batch are those of the test
tests/trainer/journeys/test_embedding.py. Model, pooling and loss (MultipleNegativesRankingLoss) are those of
sentence-transformers; optimizer, schedule and clipping are those that its Trainer uses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import get_scheduler

from spotune.job import FinetuneJob
from spotune_trainer.models.pretrained import build_model, load_tokenizer
from tests.trainer.support.embedding import embedding_job, texts_of_steps
from tests.trainer.support.preference import STEPS

JOBS = {
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


def main() -> None:
    """Write the losses of all jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    losses = {}
    for name, arguments in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            losses[name] = step_losses(embedding_job(Path(folder), **arguments), Path(folder))
    versions = {module.__name__: module.__version__ for module in (sentence_transformers, transformers, torch)}
    output.write_text(json.dumps({"versions": versions, "losses": losses}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
