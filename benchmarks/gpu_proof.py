r"""Kills every part of the whole product on a GPU, and compares the result with an undisturbed run.

Plays the one-worker schedules of the proof (tests/proof) with `spotune run`, including its Ray and driver. The model is
a Llama with rows of 2,048 tokens, in bfloat16, compiled, with `execution.deterministic`. The same oracle judges:
samples, losses and exported weights are equal bit for bit, and no process is left running. As a control, one schedule
runs without `execution.deterministic` and must be found to differ.

Then trains 1.1 billion parameters with the micro-batch that the plan chooses for this GPU, and kills the worker, the
driver, Ray's head and everything, one after the other. If a lost worker still held GPU memory, the micro-batch would be
halved. Reports the time from each kill to the next new step.

    PYTHONPATH=. python benchmarks/gpu_proof.py --seeds 8 16 24 32 40 48 --jobs 5 --without-large \
        --output benchmarks/results/gpu_proof.json
    PYTHONPATH=. python benchmarks/gpu_proof.py --control 8 --without-large \
        --output benchmarks/results/gpu_proof_control.json
    PYTHONPATH=. python benchmarks/gpu_proof.py --output benchmarks/results/gpu_proof_large.json

Exits with 1 if a check fails, or if the control finds no difference; the runs are then kept.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.checker import findings
from tests.proof.evidence import collect_evidence, exported_sha256
from tests.proof.history import losses_of, read_generations, steps_lost, surviving
from tests.proof.injector import FaultInjector
from tests.proof.references import ProductReferences, References
from tests.proof.schedules import COMMIT_EVERY, EPOCHS, make_schedule
from tests.provenance import commit
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.measured import make_llama_job, publish
from tests.trainer.support.runs import Runs

ON_GPU = torch.cuda.is_available()
SMALL, LARGE, ROW_TOKENS = ("small", "1.1B", 2048) if ON_GPU else ("tiny", "tiny", 16)
"""Models and row length; the smallest ones on a machine without a GPU, for a trial."""
BATCH = 52
"""Rows per step: an epoch of 256 rows then has as many steps as the oracle expects."""
LARGE_STEPS, LARGE_COMMIT_EVERY = 56, 4
"""A commit lasts as long as eight steps or more; a kill follows after each of four."""

EQUAL = ("samplesEqual", "lossesEqual", "weightsBitEqual")


def small_job(root: Path, zero_stage: int, deterministic: bool = True) -> FinetuneJob:
    """A job of ninety steps over 256 rows that keeps all checkpoints."""
    folder = root / f"{SMALL}-{zero_stage}-{deterministic}"
    training = {"epochs": EPOCHS, "seed": 7}
    sections = make_sections(training, zero_stage, deterministic)
    return make_llama_job(folder, SMALL, BATCH, ROW_TOKENS, sections, every=COMMIT_EVERY, keepEverySteps=1)


def large_job(root: Path) -> FinetuneJob:
    """A job with 64 rows per step that keeps one checkpoint (13 GB)."""
    sections = make_sections({"maxSteps": LARGE_STEPS, "seed": 7}, 1)
    return make_llama_job(root / "large", LARGE, 64, ROW_TOKENS, sections, every=LARGE_COMMIT_EVERY, keep=1)


def make_sections(training: Mapping[str, Any], zero_stage: int, deterministic: bool = True) -> dict[str, Any]:
    """The sections of the job that both jobs share."""
    return {
        "training": training,
        "execution": {"deterministic": deterministic, "compile": True, "zeroStage": zero_stage},
        "workers": {"count": 1, "gpus": int(ON_GPU)},
        "retry": {"backoff": {"initial": "500ms", "max": "1s"}},
    }


def prove(references: References, seed: int) -> dict[str, Any]:
    """Play one schedule on the small model; returns the events and the oracle's findings."""
    schedule = make_schedule(seed)
    injector = FaultInjector(references.runs.empty(f"seed-{seed}"), schedule, lambda _: references.job)
    began = time.monotonic()
    try:
        code, output = injector.execute()
    finally:
        injector.clean_up()
    assert code == 0, output[-4000:]
    evidence = collect_evidence(injector.run.directory, references, schedule.zero_stage, code)
    found = [*findings(evidence), *plan_findings(injector.run.directory)]
    if len(injector.injections) < len(schedule.faults):
        found.append(f"it ended after {len(injector.injections)} of {len(schedule.faults)} faults")
    return {
        "seed": seed,
        "zeroStage": schedule.zero_stage,
        "disturbances": [
            {"what": f"{injection.fault.kind} {injection.fault.point}", "step": injection.step, "hit": injection.hit}
            for injection in injector.injections
        ],
        "generations": len(evidence.generations),
        "stepsMadeAgain": steps_lost(evidence.generations),
        "seconds": round(time.monotonic() - began, 1),
        "findings": found,
    }


def kill_large(runs: Runs) -> dict[str, Any]:
    """Kill each part of a run that fills the GPU; returns the recovery times, and whether the result is the same."""
    job = large_job(runs.root)
    undisturbed = start(runs, "undisturbed", job)
    finish(undisturbed)
    expected, weights = surviving(read_generations(undisturbed.directory)), exported_sha256(undisturbed.directory)
    shutil.rmtree(undisturbed.directory.root)
    run = start(runs, "killed", job)
    kills = {
        "worker": lambda: kill(next(iter(run.ranks().values()))),
        "driver": lambda: kill(run.driver()),
        "Ray's head": run.kill_ray,
        "everything": lambda: kill_and_restart(run),
    }
    try:
        seconds = {}
        for name, deed in kills.items():
            seconds[name] = recover(run, deed)
            print(f"{name} killed: {seconds[name]} s to the next new step", flush=True)
    finally:
        finish(run)
    plan, status = (files.read_json(path) or {} for path in (run.directory.plan, run.directory.status))
    found = surviving(read_generations(run.directory))
    return {
        "model": LARGE,
        "plan": {name: plan[name] for name in ("zeroStage", "microBatchSize")},
        "lastStartup": status["startup"],
        "generations": [
            {name: event[name] for name in ("steps", "seconds", "parts")} for event in run.events("generation-ended")
        ],
        "secondsToNextNewStep": seconds,
        "samplesEqual": [record["samples"] for record in found] == [record["samples"] for record in expected],
        "lossesEqual": losses_of(found) == losses_of(expected),
        "weightsBitEqual": exported_sha256(run.directory) == weights,
        "findings": plan_findings(run.directory),
        "result": run.result(),
    }


def recover(run: LiveRun, deed: Callable[[], None]) -> float:
    """Kill something after the next commit; returns the seconds to the next new step."""
    commits = len(run.events("committed"))
    run.wait_until(lambda: len(run.events("committed")) > commits, "a commit")
    return round(run.seconds_to_new_step(deed), 1)


def kill_and_restart(run: LiveRun) -> None:
    """Kill everything and start again, as the kubelet does after the loss of a node."""
    run.kill_everything()
    run.start()


def plan_findings(directory: JobDirectory) -> list[str]:
    """Changes of the plan, which mean that a worker found too little memory."""
    return [f"the plan changed: {change}" for change in (files.read_json(directory.plan) or {})["changes"]]


def start(runs: Runs, name: str, job: FinetuneJob) -> LiveRun:
    """Start `spotune run` in its own folder."""
    run = LiveRun(runs.empty(name), job, patience_seconds=400)
    run.start()
    return run


def finish(run: LiveRun) -> None:
    """Wait until the run exits, and check that it trained the model."""
    try:
        code, output = run.wait()
    finally:
        run.clean_up()
    assert code == 0, output[-4000:]


def main() -> int:
    """Run everything, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[], help="seeds of schedules; multiples of 8 have one worker"
    )
    parser.add_argument("--jobs", type=int, default=3, help="schedules to run in parallel")
    parser.add_argument("--control", type=int, help="play this seed without `deterministic`; must be found to differ")
    parser.add_argument("--without-large", action="store_true", help="run only the small model")
    parser.add_argument("--work", type=Path, help="new folder for the runs; kept if a check fails")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        **{name: version(name) for name in ("ray", "torch", "deepspeed", "transformers")},
    }
    runs = Runs(options.work or Path(tempfile.mkdtemp()))
    runs.root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        stages = {make_schedule(seed).zero_stage for seed in options.seeds}
        references = {stage: ProductReferences(runs, small_job(runs.root, stage)) for stage in stages}
        for record in pool.map(lambda seed: prove(references[make_schedule(seed).zero_stage], seed), options.seeds):
            found.setdefault("schedules", []).append(record)
            publish(found, options.output)
    if options.control is not None:
        job = small_job(runs.root, make_schedule(options.control).zero_stage, deterministic=False)
        found["controlWithAnyKernels"] = prove(ProductReferences(runs, job), options.control)
        publish(found, options.output)
    if not options.without_large:
        found["large"] = kill_large(runs)
        publish(found, options.output)
    if not has_passed(found):
        print(f"FAILED: the runs are in {runs.root}")
        return 1
    shutil.rmtree(runs.root)
    return 0


def has_passed(found: Mapping[str, Any]) -> bool:
    """Whether all checks passed, and only the control found a difference."""
    good = not any(record["findings"] for record in found.get("schedules", []))
    if "controlWithAnyKernels" in found:
        good = good and bool(found["controlWithAnyKernels"]["findings"])
    if "large" in found:
        large = found["large"]
        good = good and not large["findings"] and all(large[name] for name in EQUAL)
    return good


if __name__ == "__main__":
    sys.exit(main())
