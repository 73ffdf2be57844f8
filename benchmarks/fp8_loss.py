r"""Compares the loss of FP8 with that of bfloat16, beside the noise between seeds: text-to-SQL, at least 500 steps.

A Llama with random weights learns the corpus of examples/text-to-sql (question and header, then SQL; several questions
are packed into a row) with the trainer's own worker, compiled. Every precision has the same seeds, which decide the
initial weights and the order of rows. Held-out questions are about the same tables, and are evaluated in bfloat16 for
all of them, as the export is used. Needs no network, and not Ray: torchrun starts the rank.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/fp8_loss.py --output benchmarks/results/fp8_loss.json
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic.alias_generators import to_camel
from streaming.base.format.mds import MDSWriter
from transformers import AutoTokenizer, LlamaConfig

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.progress import ProgressReporter
from tests.trainer.support.measured import QuicklyBuiltWorker, machine, publish, torchrun_group
from tests.trainer.support.runs import Layout, make_task, start_generation
from tests.trainer.support.tiny import make_job

CORPUS = Path(__file__).parents[1] / "examples/text-to-sql/generate.py"
PRECISIONS = ("bf16", "fp8", "fp8-rowwise")
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "200M": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
LENGTH = 512
HELD_OUT = 2000
LAST_STEPS = 50


@dataclass(frozen=True)
class Run:
    """One run: its losses, and its time.

    Attributes:
        held_out: loss of the held-out questions by step.
        last: mean training loss of the last steps.
        tokens_per_second: of its median step.
        losses: training loss of every tenth step, to plot.
    """

    held_out: dict[int, float]
    last: float
    tokens_per_second: int
    losses: list[float]


def write_corpus(folder: Path, size: str, questions: int) -> None:
    """Generate the corpus, and write packed rows of it, of held-out questions, and the model's configuration."""
    command = [sys.executable, str(CORPUS), "--output", str(folder / "corpus"), "--training-rows", str(questions)]
    subprocess.run(command, check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "corpus/model")
    tokenizer.save_pretrained(folder / "source")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    values: dict[str, Any] = {"vocab_size": len(tokenizer), **SIZES[size], **ids}
    LlamaConfig(**values).save_pretrained(folder / "source")
    lines = (folder / "corpus/train.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [_document(tokenizer, json.loads(line)) for line in lines]
    _write_rows(folder / "held-out", documents[:HELD_OUT])
    _write_rows(folder / "train", documents[HELD_OUT:])


def _document(tokenizer: Any, row: Mapping[str, str]) -> tuple[list[int], list[int]]:
    """Tokens and labels of a question; only the SQL is learned."""
    prompt = tokenizer(f"{row['question']} | {row['columns']} |")["input_ids"][:-1]
    answer = tokenizer(f" {row['sql']}")["input_ids"]
    return prompt + answer, [-100] * len(prompt) + answer


def _write_rows(folder: Path, documents: Sequence[tuple[list[int], list[int]]]) -> None:
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32", "lengths": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for row in _packed(documents):
            tokens, labels = (np.concatenate([document[side] for document in row]) for side in (0, 1))
            lengths = np.array([len(document[0]) for document in row])
            values = {"input_ids": tokens, "labels": labels, "lengths": lengths}
            writer.write({name: value.astype(np.int32) for name, value in values.items()})


def _packed(documents: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Documents in their order, as many as fit into a row."""
    row: list[tuple[list[int], list[int]]] = []
    for document in documents:
        if row and sum(len(each[0]) for each in row) + len(document[0]) > LENGTH:
            yield row
            row = []
        row.append(document)
    yield row


def train(folder: Path, precision: str, seed: int, options: argparse.Namespace) -> Run:
    """Train one run in the processes of this group of one rank."""
    directory = JobDirectory(folder / "run")
    directory.root.mkdir()
    job = make_job(
        folder / "source",
        "causal",
        model={"dtype": "bfloat16"},
        dataset={
            "train": {"source": str(folder / "train")},
            "eval": {"source": str(folder / "held-out")},
            "maxLength": LENGTH,
        },
        training={
            "epochs": 1000,
            "maxSteps": options.steps,
            "globalBatchSize": options.batch,
            "learningRate": options.learning_rate,
            "scheduler": "cosine",
            "warmupSteps": options.steps // 10,
            "seed": seed,
            "evaluation": {"everySteps": max(1, options.steps // 6)},
        },
        execution={"precision": precision, "compile": True},
        checkpoint={"every": 1_000_000},
    )
    task = make_task(directory, job, Layout(1, 1), start_generation(directory), options.batch)
    logs = directory.generation_logs(task.generation)
    with ProgressReporter(logs, 0, hang_timeout_seconds=600) as reporter:
        worker = QuicklyBuiltWorker(task, 0, 1, reporter)
        worker.train()
    steps = surviving_steps(directory)
    events = [event for event in files.read_lines(logs.events) if event["event"] == "evaluated"]
    shutil.rmtree(directory.root)
    losses = [float(step["loss"]) for step in steps]
    seconds = statistics.median(step["seconds"] for step in steps[len(steps) // 2 :])
    return Run(
        {event["step"]: event["loss"] for event in events},
        statistics.mean(losses[-LAST_STEPS:]),
        round(options.batch * LENGTH / seconds),
        [round(loss, 5) for loss in losses[::10]],
    )


def compare(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, Any]:
    """Difference of each precision from bfloat16, seed by seed, beside what bfloat16 differs by from seed to seed."""
    figures: dict[str, Callable[[Run], float]] = {
        "heldOutLoss": lambda run: run.held_out[max(run.held_out)],
        "trainingLoss": lambda run: run.last,
    }
    found: dict[str, Any] = {}
    for name, figure in figures.items():
        exact = {seed: figure(run) for seed, run in runs[PRECISIONS[0]].items()}
        found[name] = {"bf16": _spread(list(exact.values()))}
        for precision in PRECISIONS[1:]:
            of_seeds = {seed: figure(run) for seed, run in runs.get(precision, {}).items() if seed in exact}
            if of_seeds:
                differences = [value - exact[seed] for seed, value in of_seeds.items()]
                found[name][precision] = _spread(list(of_seeds.values())) | {
                    "meanDifferenceFromBf16": round(statistics.mean(differences), 6),
                    "differencesBySeed": [round(each, 6) for each in differences],
                }
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.mean(values), 6),
        "standardDeviationOverSeeds": round(statistics.stdev(values), 6) if len(values) > 1 else 0.0,
        "lowest": round(min(values), 6),
        "highest": round(max(values), 6),
    }


def main() -> None:
    """Train every precision with every seed; writes the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--size", choices=SIZES, default="200M")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {LENGTH} tokens in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--questions", type=int, default=80_000)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_corpus(folder, options.size, options.questions)
    runs: dict[str, dict[int, Run]] = {}
    with torchrun_group():
        for seed in options.seeds:
            for precision in options.precisions:
                started = time.monotonic()
                run = train(folder, precision, seed, options)
                runs.setdefault(precision, {})[seed] = run
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                print(f"{precision}, seed {seed}: {run.held_out}, {time.monotonic() - started:.0f} s", file=sys.stderr)
                settings = {"model": options.size, "steps": options.steps, "batch": options.batch, "length": LENGTH}
                found = {"machine": machine(), **settings, "learningRate": options.learning_rate}
                if PRECISIONS[0] in runs:
                    found["comparison"] = compare(runs)
                found["runs"] = [
                    {"precision": name, "seed": each, **{to_camel(key): value for key, value in vars(run).items()}}
                    for name, of_seeds in runs.items()
                    for each, run in of_seeds.items()
                ]
                publish(found, options.output)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
