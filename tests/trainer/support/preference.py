"""Jobs that learn from pairs or labelled answers: a small corpus, its shards, and a small causal model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import load_tokenizer
from tests.trainer.support.tiny import make_job, save_source

PAIRS = 64
BATCH = 8
EPOCHS = 3
KTO_WEIGHTS = {"desirableWeight": 0.75, "undesirableWeight": 1.5}
"""The desirable answers of `labelled_rows` together have the weight of the others, which are half as many."""
STEPS = EPOCHS * PAIRS // BATCH


def preference_rows(count: int = PAIRS) -> list[dict[str, str]]:
    """Questions with a right and a wrong query, all of uneven lengths.

    Answers begin with a space, so that a tokenizer gives prompt and answer the same tokens together and apart.
    """
    rows = []
    for number in range(count):
        condition = " AND age > 30" * (number % 3)
        rows.append(
            {
                "prompt": "how many singers are there ? " * (number % 4 + 1) + f"above {number} :",
                "chosen": f" SELECT count(*) FROM singer WHERE age > {number}{condition}",
                "rejected": f" SELECT name FROM singer{condition * 2} LIMIT {number % 7}",
            }
        )
    return rows


def labelled_rows(count: int = PAIRS) -> list[dict[str, Any]]:
    """The questions of `preference_rows` with one answer each: of three in a row, two are right, the desirable ones."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen"] if number % 3 else row["rejected"],
            "label": bool(number % 3),
        }
        for number, row in enumerate(preference_rows(count))
    ]


def preference_job(root: Path, objective: str, pairs: int = PAIRS, **sections: Any) -> FinetuneJob:
    """A job that trains on rows for `STEPS` steps; its shards and model are written to `root`.

    The rows are `labelled_rows` for kto, and `preference_rows` for the other objectives.

    Args:
        root: a folder.
        objective: `dpo`, `orpo`, `simpo`, `kto` or `reward`.
        pairs: number of rows.
        sections: of the spec, merged over its values.
    """
    source = root / "model"
    if not source.exists():
        save_source(source, "causal", attention_dropout=0.0)
    rows = labelled_rows(pairs) if objective == "kto" else preference_rows(pairs)
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    columns = {name: f"{{{name}}}" for name in rows[0]} | {"maxLength": 96}
    dataset = {"train": {"source": str(root / "shards")}, "eval": None, **columns, **sections.pop("dataset", {})}
    training = {
        "objective": objective,
        "epochs": EPOCHS,
        "globalBatchSize": BATCH,
        "learningRate": 1e-3,
        "scheduler": "linear",
        "warmupSteps": 3,
        "seed": 7,
        **({"preference": KTO_WEIGHTS} if objective == "kto" else {}),
        **sections.pop("training", {}),
    }
    checkpoint = {"every": STEPS, **sections.pop("checkpoint", {})}
    job = make_job(source, "causal", dataset=dataset, training=training, checkpoint=checkpoint, **sections)
    options = PrepareOptions.from_job(job)
    prepare([root / "pairs.jsonl"], root / "shards", options, load_tokenizer(job))
    return job


def rows_of_steps(job: FinetuneJob, root: Path) -> list[Mapping[str, Any]]:
    """The raw rows of all steps, in the order of training."""
    rows = labelled_rows() if job.spec.training.objective == "kto" else preference_rows()
    return [rows[sample_id] for sample_id in samples_of_steps(job, root)]


def samples_of_steps(job: FinetuneJob, root: Path) -> list[int]:
    """The sample ids of all steps, in the order of training."""
    shards = ShardedDataset(str(root / "shards"), root / "cache")
    schedule = SampleSchedule(shards.shard_sizes, BATCH, job.spec.training.seed)
    return [sample_id for step in range(STEPS) for sample_id in schedule.sample_ids(step).tolist()]
