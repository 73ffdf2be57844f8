r"""Measures the time from `spotune run` to the first step: with nothing compiled before, and with a cache in the image.

Makes a Llama with random weights in a folder, as a pretrained model, and runs three jobs on it, each in an empty
directory. The first one compiles everything (cold). The others find what it compiled in the folder that
SPOTUNE_COMPILE_CACHE names, as if the image contained it (warm). This process has imported the same packages before, so
their files are in the page cache of the machine. Parts of a start, in seconds:

* ray: imports of the command, and Ray's start;
* driver: until the driver has claimed the first generation: its imports, and the plan;
* process: until rank 0 begins, whose node has imported modules meanwhile;
* data, model, engine, firstStep: `startup` in rank 0's progress.json;
* compile: the part of firstStep in which the step waited for the compiler.

    python -m benchmarks.first_step --output benchmarks/results/first_step.json

Without a GPU it trains on the processor:

    python -m benchmarks.first_step --size tiny --batch 2 --length 128
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machine import describe_machine
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.engine.compile.cache import IMAGE_FOLDER
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.live import LiveRun
from tests.trainer.support.measured import LLAMAS, make_llama_job, publish

STARTUP = ("data", "model", "engine", "firstStep")


def make_job(folder: Path, size: str, batch: int, length: int) -> FinetuneJob:
    """A job on a saved model with random weights, on a GPU if there is one."""
    gpus = int(torch.cuda.is_available())
    sections: dict[str, dict[str, Any]] = {
        "model": {"initialise": "pretrained"},
        "workers": {"count": 1, "gpus": gpus},
        "execution": {"zeroStage": 1, "microBatchSize": min(batch, 16), "compile": True},
    }
    job = make_llama_job(folder, size, batch, length, sections, every=1_000_000)
    with torch.device("cuda" if gpus else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMAS[size]), dtype=torch.bfloat16)
    model.save_pretrained(folder / "source")
    del model
    torch.cuda.empty_cache()
    return job


def start(directory: JobDirectory, job: FinetuneJob, cache: Path | None) -> dict[str, Any]:
    """Run a job until its first step; returns the seconds by part."""
    run = LiveRun(directory, job, {IMAGE_FOLDER: str(cache) if cache else ""})
    logs = directory.generation_logs(1)
    started = time.time()
    run.start()
    try:
        run.wait_until(lambda: "firstStep" in (files.read_json(logs.progress) or {}).get("startup", {}), "a step")
        compiles = job.spec.execution.compile
        if compiles and cache is None:
            run.wait_until(lambda: any(directory.compiled.glob("*.tar.gz")), "the compile cache")
        attempt = run.events("attempt-started")[0]["time"]
        claimed = run.events("generation-started")[0]["time"]
    finally:
        run.clean_up()
    progress = files.read_json(logs.progress) or {}
    began, startup = progress["startedAt"], progress["startup"]
    parts = {"ray": attempt - started, "driver": claimed - attempt, "process": began - claimed}
    parts |= {name: startup[name] for name in STARTUP}
    compiled = next((event for event in files.read_lines(logs.events) if event["event"] == "compiled"), None)
    found = {name: round(seconds, 2) for name, seconds in parts.items()}
    return {
        "all": round(sum(parts.values()), 2),
        "parts": found,
        "compile": compiled and {name: compiled[name] for name in ("start", "seconds", "graphs", "cached")},
    }


def main() -> None:
    """Measure, and write what is measured so far after each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="size of the model")
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--warm", type=int, default=2, help="number of warm starts")
    parser.add_argument("--eager", action="store_true", help="also measure a start that compiles nothing")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = describe_machine("ray", "torch", "deepspeed", "transformers") | {"device": device}
    result: dict[str, Any] = {"machine": machine, "model": options.size, "batch": options.batch}
    result |= {"length": options.length, "cold": None, "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        job = make_job(root, options.size, options.batch, options.length)
        cold = JobDirectory(root / "cold")
        result["cold"] = start(cold, job, None)
        result["cacheBytes"] = sum(path.stat().st_size for path in cold.compiled.iterdir())
        publish(result, options.output)
        for number in range(options.warm):
            result["warm"].append(start(JobDirectory(root / f"warm-{number}"), job, cold.compiled))
            publish(result, options.output)
        if options.eager:
            spec = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
            spec["spec"]["execution"]["compile"] = False
            result["eager"] = start(JobDirectory(root / "eager"), FinetuneJob.model_validate(spec), None)
            publish(result, options.output)


if __name__ == "__main__":
    main()
