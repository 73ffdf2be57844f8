"""Job directories as a release writes them. `tests.releases.record` runs this file in the environment of that release.

python tests/releases/recording/job_directories.py INPUTS OUTPUT

INPUTS becomes a folder with a model and data, whose path is part of each job. OUTPUT gets, for a full finetune and for
an adapter, the directory of a run that was stopped after some commits, the job file, and what an undisturbed run gave.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.export.huggingface import weights_sha256
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import write_shards
from tests.trainer.support.tiny import save_source

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"adapter": {"lora": {"r": 2, "alpha": 4, "dropout": 0.1}}},
}
MODEL = {
    "attention_dropout": 0.1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
"""Values of a Llama with 4,000 parameters."""
STEPS = 60
STOPPED_AFTER = 20
PROMPT = "how many singers are there ?"
_SPOTUNE = (sys.executable, "-c", "from spotune.cli.main import main; main()")
_SECONDS = 240.0


def write_inputs(inputs: Path) -> None:
    """A Llama with its tokenizer, and shards of random rows."""
    inputs.mkdir(parents=True)
    save_source(inputs / "model", "causal", **MODEL)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs / "model"), dtype=torch.float32)
    model.save_pretrained(inputs / "model")
    write_shards(inputs / "train", "causal", samples=40)
    write_shards(inputs / "eval", "causal", samples=8, seed=12)


def job_of_kind(kind: str, inputs: Path) -> dict[str, Any]:
    """The job of a kind: 60 steps, with a commit every five."""
    spec: dict[str, Any] = {
        "model": {"source": str(inputs / "model"), "task": "causal", "dtype": "float32"},
        "dataset": {"train": {"source": str(inputs / "train")}, "eval": {"source": str(inputs / "eval")}},
        "training": {"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 1e-3, "warmupSteps": 3, "seed": 7},
        "execution": {"microBatchSize": 4},
        "checkpoint": {"every": 5, "keep": 2},
        "tracking": {"tensorboard": False},
        "workers": {"count": 1, "gpus": 0},
    }
    metadata = {"name": f"release-{kind}"}
    return {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": metadata,
        "spec": spec | KINDS[kind],
    }


def run(job: Path, directory: Path, log: Path, stop_after: int | None = None) -> None:
    """`spotune run`, to its end or until it is stopped (SIGTERM) after some steps."""
    with log.open("w") as output:
        command = [*_SPOTUNE, "run", str(job), "--directory", str(directory)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        until = time.monotonic() + _SECONDS
        while process.poll() is None:
            assert time.monotonic() < until, log.read_text()
            if stop_after is not None and _last_step(directory) >= stop_after:
                process.send_signal(signal.SIGTERM)
                process.wait(_SECONDS)
            time.sleep(0.001)
    is_trained = JobDirectory(directory).result.exists()
    assert is_trained == (stop_after is None), log.read_text()


def _last_step(directory: Path) -> int:
    logs = JobDirectory(directory).generation_logs(1).steps
    return max((int(line["step"]) for line in files.read_lines(logs)), default=0) if logs.exists() else 0


def record(kind: str, inputs: Path, output: Path) -> None:
    """Record the directories of a kind of job."""
    output.mkdir(parents=True)
    job = output / "job.json"
    job.write_text(json.dumps(job_of_kind(kind, inputs)))
    work = output.with_suffix(".work")
    run(job, work / "undisturbed", work.with_suffix(".log"))
    run(job, work / "stopped", work.with_suffix(".log"), stop_after=STOPPED_AFTER)
    undisturbed = JobDirectory(work / "undisturbed")
    predict = [*_SPOTUNE, "predict", str(undisturbed.root), PROMPT, "--output", "json"]
    predicted = subprocess.run(predict, check=True, stdout=subprocess.PIPE, text=True)
    steps = surviving_steps(undisturbed)
    expected = {
        "losses": [step["loss"] for step in steps],
        "samples": [step["samples"] for step in steps],
        "weights": weights_sha256(undisturbed.export),
        "evalLoss": json.loads(undisturbed.result.read_text())["evalLoss"],
        "prompt": PROMPT,
        "predicted": json.loads(predicted.stdout),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    (output / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.move(work / "stopped", output / "directory")
    shutil.move(undisturbed.export, output / "export")
    shutil.rmtree(work)


def main() -> None:
    inputs, output = Path(sys.argv[1]), Path(sys.argv[2])
    assert os.environ.get("OMP_NUM_THREADS") == "1", "sums depend on the number of threads"
    write_inputs(inputs)
    for kind in KINDS:
        record(kind, inputs, output / kind)


if __name__ == "__main__":
    main()
