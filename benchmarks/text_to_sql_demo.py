"""Trains the demo's job with several seeds, and reports execution accuracy, loss and speed of each, and their range.

    make demo    # once: generates the corpus and its shards
    python -m benchmarks.text_to_sql_demo --seeds 1 2 42 --output benchmarks/results/text_to_sql_demo.json

Each run is `spotune run` with the job of examples/text-to-sql and another `training.seed`, in its own folder. The seed
determines the initial weights and the order of samples; the corpus and the evaluation set stay the same.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from spotune_trainer.job_directory.layout import JobDirectory
from tests.provenance import commit

EXAMPLE = Path(__file__).parents[1] / "examples" / "text-to-sql"
LIBRARIES = ("torch", "deepspeed", "ray", "transformers")


def main() -> None:
    """Train once per seed and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 42])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    baseline = baseline_accuracy()
    runs = []
    for seed in options.seeds:
        runs.append(train(seed))
        print(f"seed {seed}: execution accuracy {runs[-1]['executionAccuracy']:.1%}, {runs[-1]['wallSeconds']:.0f} s")
        accuracies = [run["executionAccuracy"] for run in runs]
        content = {
            "command": "python -m benchmarks.text_to_sql_demo --seeds " + " ".join(map(str, options.seeds)),
            "machine": machine(),
            "baselineExecutionAccuracy": baseline,
            "executionAccuracy": {"lowest": min(accuracies), "highest": max(accuracies)},
            "runs": runs,
        }
        options.output.write_text(json.dumps(content, indent=2) + "\n")


def baseline_accuracy() -> float:
    """Execution accuracy of the baseline, from 0 to 1 (see examples/text-to-sql/baseline.py)."""
    shown = subprocess.run(
        [sys.executable, str(EXAMPLE / "baseline.py")], check=True, capture_output=True, text=True
    ).stdout
    return float(shown.rsplit("execution accuracy ", 1)[1].split("%")[0]) / 100


def train(seed: int) -> dict[str, Any]:
    """Train the demo's job with a seed; returns its `result.json` with the seed and the wall clock in seconds."""
    job = yaml.safe_load((EXAMPLE / "finetunejob.yaml").read_text())
    job["spec"]["training"]["seed"] = seed
    with tempfile.TemporaryDirectory() as folder:
        directory = JobDirectory(Path(folder) / "run")
        file = EXAMPLE / f".seed-{seed}.yaml"  # sources are relative to the job file's folder
        file.write_text(yaml.safe_dump(job))
        started = time.monotonic()
        try:
            command = [
                str(Path(sys.executable).with_name("spotune")),
                "run",
                str(file),
                "--directory",
                str(directory.root),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        finally:
            file.unlink()
        result: dict[str, Any] = json.loads(directory.result.read_text())
        del result["export"]  # a path in the temporary folder
    return {"seed": seed, "wallSeconds": round(time.monotonic() - started, 1), **result}


def machine() -> dict[str, Any]:
    """The machine and the software versions."""
    libraries = {name: version(name) for name in LIBRARIES}
    return {"commit": commit(), "cores": os.cpu_count(), "python": platform.python_version(), **libraries}


if __name__ == "__main__":
    main()
