"""Jobs that learn labels of texts or of words: a small corpus, its shards, and models of a few thousand parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

from spotune.job import FinetuneJob
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import load_tokenizer
from tests.trainer.support.tiny import make_job, save_config, save_tokenizer

TOPICS = ("music", "sport", "weather")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ROWS = 64
BATCH = 8
EPOCHS = 3
STEPS = EPOCHS * ROWS // BATCH

_WORDS = {
    "music": ["the", "singer", "sang", "an", "old", "song"],
    "sport": ["our", "team", "won", "by", "two", "goals"],
    "weather": ["rain", "and", "wind", "all", "day"],
}
_PEOPLE = (["Ann"], ["Bob", "Miller"])
_PLACES = (["Rome"], ["New", "York"], ["Oslo"])


def texts(count: int = ROWS) -> list[dict[str, str]]:
    """Texts of uneven lengths with the topic that they are about."""
    rows = []
    for number in range(count):
        topic = TOPICS[(number * 2 + number // 4) % len(TOPICS)]
        words = (_WORDS[topic] * 3)[number % 3 : number % 3 + 3 + number % 7]
        rows.append({"text": " ".join([*words, str(number)]), "label": topic})
    return rows


def sentences(count: int = ROWS) -> list[dict[str, list[str]]]:
    """Sentences of uneven lengths with people and places, and the IOB2 label of each word."""
    rows = []
    for number in range(count):
        person, place = _PEOPLE[number % 2], _PLACES[number % 3]
        filler = ["yesterday"] * (number % 4)
        words = [*filler, *person, "went", "to", *place, "."]
        tags = ["O"] * len(filler) + _tags("PER", person) + ["O", "O"] + _tags("LOC", place) + ["O"]
        rows.append({"tokens": words, "tags": tags})
    return rows


def save_model(folder: Path, model_type: str, dropout: float = 0.0) -> Path:
    """Save configuration and tokenizer of a small BERT or Llama; returns the folder."""
    if not folder.exists():
        if model_type == "bert":
            vocabulary = save_wordpiece_tokenizer(folder)
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            dropouts: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            values = {
                "vocab_size": vocabulary,
                "max_position_embeddings": 64,
                "initializer_range": 0.2,
                **sizes,
                **dropouts,
            }
            BertConfig(**values).save_pretrained(folder)
        else:
            save_config(folder, "causal", attention_dropout=dropout)
            save_tokenizer(folder)
    return folder


def save_wordpiece_tokenizer(folder: Path) -> int:
    """Save a tokenizer like BERT's, without an end-of-text token; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=128, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(
        [row["text"] for row in texts()] + [" ".join(row["tokens"]) for row in sentences()], trainer
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def labelled_job(
    root: Path,
    objective: str = "classification",
    model_type: str = "bert",
    *,
    rows: int = ROWS,
    dropout: float = 0.0,
    **sections: Any,
) -> FinetuneJob:
    """A job that trains on `texts` or on `sentences`, by default for `STEPS` steps.

    Its shards and model are written to `root`.

    Args:
        root: a folder.
        objective: `classification` or `tokenClassification`.
        model_type: `bert` or `llama`.
        rows: number of rows.
        dropout: of the model.
        sections: of the spec, merged over its values.
    """
    words = objective == "tokenClassification"
    write_rows(root / "rows.jsonl", sentences(rows) if words else texts(rows))
    columns = {"text": "{tokens}", "label": "{tags}"} if words else {"text": "{text}", "label": "{label}"}
    dataset = {
        "train": {"source": str(root / "shards")},
        "eval": None,
        "labels": list(TAGS if words else TOPICS),
        "maxLength": 64,
        **columns,
        **sections.pop("dataset", {}),
    }
    training = {
        "objective": objective,
        "epochs": EPOCHS,
        "globalBatchSize": BATCH,
        "learningRate": 1e-2,
        "scheduler": "linear",
        "warmupSteps": 3,
        "seed": 7,
        **sections.pop("training", {}),
    }
    checkpoint = {"every": STEPS, **sections.pop("checkpoint", {})}
    source = save_model(root / "model", model_type, dropout)
    job = make_job(source, "causal", dataset=dataset, training=training, checkpoint=checkpoint, **sections)
    prepare([root / "rows.jsonl"], root / "shards", PrepareOptions.from_job(job), load_tokenizer(job))
    return job


def rows_of_steps(job: FinetuneJob, root: Path) -> list[Any]:
    """The raw rows of all steps, in the order of training."""
    shards = ShardedDataset(str(root / "shards"), root / "cache")
    schedule = SampleSchedule(shards.shard_sizes, BATCH, job.spec.training.seed)
    rows: Sequence[Any] = sentences() if job.spec.training.objective == "tokenClassification" else texts()
    return [rows[sample_id] for step in range(STEPS) for sample_id in schedule.sample_ids(step).tolist()]


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def _tags(kind: str, words: Sequence[str]) -> list[str]:
    return [f"{'I' if number else 'B'}-{kind}" for number in range(len(words))]
