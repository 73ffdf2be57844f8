"""Every job in examples/ trains, with a tiny model of the same family, short rows and a few steps.

Only what CPUs cannot do is replaced: float16 by bfloat16. All other settings of the job file are used as they are.
"""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from spotune.job import FinetuneJob
from spotune.job_file.load import load_job, replace_fields
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim, surviving_steps
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.driver.planning import plan_run
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import load_tokenizer
from spotune_trainer.training.task import WorkerTask
from tests.examples.jobs import EXAMPLES, PUBLISHED, config_of
from tests.examples.wikisql import write_release
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import train_rank
from tests.trainer.support.tiny import VOCABULARY, save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.every_parameter]

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
STEPS = 3
WORKERS = 2
MEMORY_BYTES = 4 * 10**9
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY: dict[str, dict[str, int]] = {
    "bert": LLAMA,
    "bloom": {"n_embed": 16, "n_layer": 2, "n_head": 2},
    "llama": {**LLAMA, "num_key_value_heads": 1},
    "mistral": {**LLAMA, "num_key_value_heads": 1},
    "qwen3": {**LLAMA, "num_key_value_heads": 1, "head_dim": 8},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
}
"""Sizes of the tiny models by family. All other settings are those of the full-size configuration."""
TEXTS = [f"{'A film about many singers and a ship. ' * (number % 3 + 1)}It has {number} acts." for number in range(40)]

Rows = dict[str, Path]
"""Files of rows in their published format, by `train` and, if there is one, `eval`."""


def wikisql(folder: Path) -> Rows:
    command = [sys.executable, str(EXAMPLES / "t5-wikisql" / "convert.py"), "--data", str(write_release(folder))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"train": folder / "rows" / "train.jsonl", "eval": folder / "rows" / "dev.jsonl"}


def imdb(folder: Path) -> Rows:
    file = folder / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "label": [number % 2 for number in range(len(TEXTS))]}), file)
    return {"train": file}


def c4(folder: Path) -> Rows:
    file = folder / "c4-train.00000-of-01024.json.gz"
    rows = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.com"} for text in TEXTS]
    with gzip.open(file, "wt") as lines:
        lines.writelines(f"{json.dumps(row)}\n" for row in rows)
    return {"train": file}


def dolly(folder: Path) -> Rows:
    file = folder / "databricks-dolly-15k.jsonl"
    rows = [
        {"instruction": "Sum it up.", "context": text, "response": "A film.", "category": "summarization"}
        for text in TEXTS
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"train": file}


def ultrafeedback(folder: Path) -> Rows:
    question = [{"role": "user", "content": "Sum it up."}]
    rows = [
        {
            "prompt": question[0]["content"],
            "chosen": [*question, {"role": "assistant", "content": text}],
            "rejected": [*question, {"role": "assistant", "content": f"No. {text}"}],
            "score_chosen": 8.5,
        }
        for text in TEXTS
    ]
    files = {"train": folder / "train_prefs-00000-of-00001.parquet", "eval": folder / "test_prefs.parquet"}
    for file in files.values():
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return files


def kto_mix(folder: Path) -> Rows:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Sum up number {number}."}],
            "completion": [{"role": "assistant", "content": text}],
            "label": number % 2 == 0,
        }
        for number, text in enumerate(TEXTS)
    ]
    published, converted = folder / "train-00000-of-00001.parquet", folder / "rows" / "train.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist(rows), published)
    script = EXAMPLES / "mistral-kto-mix" / "chats.py"
    subprocess.run([sys.executable, str(script), str(published), "--output", str(converted)], check=True)
    return {"train": converted, "eval": converted}


def all_nli(folder: Path) -> Rows:
    files = {name: folder / f"{name}-00000-of-00001.parquet" for name in ("train", "dev")}
    rows = [
        {"anchor": text, "positive": f"There is a film of {number} acts.", "negative": f"It has {number + 1} acts."}
        for number, text in enumerate(TEXTS)
    ]
    for file in files.values():
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return {"train": files["train"], "eval": files["dev"]}


def dolly_and_wikisql(folder: Path) -> Rows:
    sql = wikisql(folder)
    return {"instructions": dolly(folder)["train"], "sql": sql["train"], "sql-dev": sql["eval"]}


def imdb_or_wikiann(folder: Path) -> Rows:
    """Rows that have the columns of both: each job reads its own."""
    tags = [number % 7 for number in range(3)]
    rows = [
        {"text": text, "label": number % 2, "tokens": ["Ann", "saw", "Rome"], "ner_tags": tags}
        for number, text in enumerate(TEXTS)
    ]
    files = {"train": folder / "train-00000-of-00001.parquet", "eval": folder / "validation-00000-of-00001.parquet"}
    for file in files.values():
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return files


WRITERS: dict[str, Callable[[Path], Rows]] = {
    "t5-wikisql": wikisql,
    "bloomz-imdb": imdb,
    "mistral-pretrain": c4,
    "llama-dolly": dolly,
    "mistral-ultrafeedback": ultrafeedback,
    "mistral-kto-mix": kto_mix,
    "qwen-nli": all_nli,
    "llama-mixture": dolly_and_wikisql,
    "bert-labels": imdb_or_wikiann,
}
TEMPLATES = {
    "instructions": {"prompt": "{instruction} {context} ", "completion": "{response}"},
    "sql": {"prompt": "{question} {columns} ", "completion": "{sql}"},
    "sql-dev": {"prompt": "{question} {columns} ", "completion": "{sql}"},
}
"""Templates of the sources of a mixture, whose job has none."""


def save_tiny_model(job: FinetuneJob, folder: Path, config: dict[str, Any]) -> Path:
    """Save a tiny model of the family of `config`, its tokenizer, and weights if the job needs pretrained ones."""
    ends = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    tiny = AutoConfig.for_model(**{**config, **TINY[config["model_type"]], **ends})
    if job.spec.model.initialise == "pretrained":
        auto_model: Any = AutoModelForSeq2SeqLM if job.spec.model.task == "seq2seq" else AutoModelForCausalLM
        if config["model_type"] == "bert":
            auto_model = AutoModelForMaskedLM
        auto_model.from_config(tiny).save_pretrained(folder)
    else:
        tiny.save_pretrained(folder)
    tokenizer = save_tokenizer(folder)
    if job.spec.dataset.chosen or job.spec.dataset.messages:
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
    return folder


def toy(job: FinetuneJob, model: Path, shards: Path) -> FinetuneJob:
    """The job, scaled down for two CPUs."""
    spec = job.spec
    values: dict[str, Any] = {
        "model.source": str(model),
        "model.tokenizer": "",
        "dataset.maxLength": 128,
        "training.maxSteps": STEPS,
        "training.globalBatchSize": 8,
        "workers.count": WORKERS,
        "workers.min": WORKERS,
        "workers.gpus": 0,
        "tracking.wandb": None,
        "output.hub": None,
    }
    if spec.dataset.mixture:
        values |= {
            f"dataset.mixture[{number}].train.source": str(shards / source.name)
            for number, source in enumerate(spec.dataset.mixture)
        }
        values |= {"dataset.mixture[1].fromStep": 1, "dataset.mixture[1].eval.source": str(shards / "sql-dev")}
    else:
        values["dataset.train.source"] = str(shards / "train")
    if spec.model.dtype == "float16":
        values["model.dtype"] = "bfloat16"
    if spec.dataset.eval is not None and spec.dataset.eval.source is not None:
        values["dataset.eval.source"] = str(shards / "eval")
    if spec.training.warmup_steps:
        values["training.warmupSteps"] = 1
    if spec.training.evaluation.generate:
        values["training.evaluation.maxNewTokens"] = 8
    return replace_fields(job, {f"spec.{path}": value for path, value in values.items()})


def train(job: FinetuneJob, directory: JobDirectory) -> dict[str, Any]:
    """Run the job's first worker group until it exits; returns its result."""
    plan = plan_run(job, directory, None, lambda: MEMORY_BYTES)
    task = WorkerTask(
        directory=str(directory.root),
        generation=claim(directory, None).number,
        restore=None,
        job=job.model_dump(mode="json"),
        plan=plan.to_json(),
    )
    figures: dict[str, Any] = run_group(WORKERS, train_rank, task)[0].summary
    return figures


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_an_example_trains(file: Path, tmp_path: Path) -> None:
    example = load_job(file)
    config = config_of(example, file.parent)
    model = save_tiny_model(example, tmp_path / "model", config)
    job = toy(example, model, tmp_path / "shards")
    for split, rows in WRITERS[file.parent.name](tmp_path).items():
        templates = {f"spec.dataset.{name}": text for name, text in TEMPLATES.get(split, {}).items()}
        options = replace(PrepareOptions.from_job(replace_fields(job, templates)), processes=1)
        prepare([rows], tmp_path / "shards" / split, options, load_tokenizer(job))

    directory = JobDirectory(tmp_path / "job")
    directory.logs.mkdir(parents=True)
    figures = train(job, directory)

    losses = [record["loss"] for record in surviving_steps(directory)]
    assert len(losses) == STEPS
    assert all(0 < loss < 2 * math.log(VOCABULARY) for loss in losses), "about as much as a guess has"
    assert figures["evalLoss"] is not None
    assert (figures["exactMatch"] is None) != example.spec.training.evaluation.generate
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    assert checkpoint.name.step == STEPS
    assert all("lora_" in name for name in checkpoint.manifest.parameters) == (example.spec.adapter is not None)
    asked, plan = example.spec.execution, json.loads(directory.plan.read_text())
    assert asked.zero_stage in ("auto", plan["zeroStage"])
    assert asked.gradient_checkpointing in ("auto", plan["gradientCheckpointing"])
    assert json.loads((directory.export / "config.json").read_text())["model_type"] == config["model_type"]
