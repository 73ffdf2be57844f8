r"""Kills of the whole product on a GPU: `spotune run` with its Ray and its driver, against a run that nobody disturbs.

Plays the schedules of the proof (tests/proof) that have one worker on a Llama with rows of 2,048 tokens, in bfloat16,
compiled, with `execution.deterministic`, and judges them by the same oracle: samples, losses and exported weights equal
bit for bit, nothing left running. One of them once more without that field has to be found to differ. Then trains
1.1 billion parameters with the micro-batch that the plan gives this GPU, and kills the worker, the driver, Ray's head
and everything, one after the other: a GPU that a lost worker still holds would show as a micro-batch that was halved.
Says how long each took to the next new step.

    PYTHONPATH=. python benchmarks/gpu_proof.py --seeds 8 16 24 32 40 48 --jobs 5 --without-large \
        --output benchmarks/results/gpu_proof.json
    PYTHONPATH=. python benchmarks/gpu_proof.py --control 8 --without-large \
        --output benchmarks/results/gpu_proof_control.json
    PYTHONPATH=. python benchmarks/gpu_proof.py --output benchmarks/results/gpu_proof_large.json

Ends with 1 where something is found that must not be, or the control finds nothing; the runs are kept then.
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
from tests.proof.evidence import exported_sha256, gather
from tests.proof.history import losses_of, read_generations, steps_lost, surviving
from tests.proof.injector import Performance
from tests.proof.references import Reference, References
from tests.proof.schedules import COMMIT_EVERY, EPOCHS, make_schedule
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.measured import make_llama_job, publish
from tests.trainer.support.runs import Layout, Runs

ON_GPU = torch.cuda.is_available()
SMALL, LARGE, ROW_TOKENS = ("small", "1.1B", 2048) if ON_GPU else ("tiny", "tiny", 16)
"""Without a GPU this can be tried at its smallest."""
BATCH = 52
"""Of 256 rows, so that an epoch has as many steps as the oracle's."""
LARGE_STEPS, LARGE_COMMIT_EVERY = 32, 4

EQUAL = ("samplesEqual", "lossesEqual", "weightsBitEqual")


class UndisturbedCommand(References):
    """References that are runs of the whole product: the worker of the others would train on processors."""

    def undisturbed(self, layout: Layout) -> Reference:
        """From the beginning to the end, as a user runs it."""
        with self._only_one((layout,)) as key:
            if key not in self._made:
                run = start(self.runs, "undisturbed", self.job)
                finish(run)
                records = tuple(surviving(read_generations(run.directory)))
                self._made[key] = Reference(run.directory, records, (), exported_sha256(run.directory))
            return self._made[key]


def small_job(root: Path, zero_stage: int, deterministic: bool = True) -> FinetuneJob:
    """Ninety steps over 256 rows, whose checkpoints all stay."""
    folder = root / f"{SMALL}-{zero_stage}-{deterministic}"
    training = {"epochs": EPOCHS, "seed": 7}
    sections = make_sections(training, zero_stage, deterministic)
    return make_llama_job(folder, SMALL, BATCH, ROW_TOKENS, sections, every=COMMIT_EVERY, keepEverySteps=1)


def large_job(root: Path) -> FinetuneJob:
    """Steps of 64 rows; checkpoints of 13 GB, of which one stays."""
    sections = make_sections({"maxSteps": LARGE_STEPS, "seed": 7}, 1)
    return make_llama_job(root / "large", LARGE, 64, ROW_TOKENS, sections, every=LARGE_COMMIT_EVERY, keep=1)


def make_sections(training: Mapping[str, Any], zero_stage: int, deterministic: bool = True) -> dict[str, Any]:
    """What both jobs share, and what they train."""
    return {
        "training": training,
        "execution": {"deterministic": deterministic, "compile": True, "zeroStage": zero_stage},
        "workers": {"count": 1, "gpus": int(ON_GPU)},
        "retry": {"backoff": {"initial": "500ms", "max": "1s"}},
    }


def prove(references: References, seed: int) -> dict[str, Any]:
    """Play one schedule on the small model; what happened, and what the oracle says."""
    schedule = make_schedule(seed)
    performance = Performance(references.runs.empty(f"seed-{seed}"), schedule, lambda _: references.job)
    began = time.monotonic()
    try:
        code, output = performance.play()
    finally:
        performance.end()
    assert code == 0, output[-4000:]
    evidence = gather(performance.run.directory, references, schedule.zero_stage, code)
    found = [*findings(evidence), *plan_findings(performance.run.directory)]
    if len(performance.strikes) < len(schedule.disturbances):
        found.append(f"it ended after {len(performance.strikes)} of {len(schedule.disturbances)} disturbances")
    return {
        "seed": seed,
        "zeroStage": schedule.zero_stage,
        "disturbances": [
            {"what": f"{strike.disturbance.deed} {strike.disturbance.moment}", "step": strike.step, "hit": strike.hit}
            for strike in performance.strikes
        ],
        "generations": len(evidence.generations),
        "stepsMadeAgain": steps_lost(evidence.generations),
        "seconds": round(time.monotonic() - began, 1),
        "findings": found,
    }


def kill_large(runs: Runs) -> dict[str, Any]:
    """Kill each part of a run that fills the GPU; how long to the next new step, and whether it ended the same."""
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
        "everything": lambda: kill_and_start_again(run),
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
    """Kill something once there is another commit, and wait for a step that is new; how long that took."""
    commits = len(run.events("committed"))
    run.wait_until(lambda: len(run.events("committed")) > commits, "a commit")
    return round(run.seconds_to_new_step(deed), 1)


def kill_and_start_again(run: LiveRun) -> None:
    """What the kubelet does after the loss of a node."""
    run.kill_everything()
    run.start()


def plan_findings(directory: JobDirectory) -> list[str]:
    """A plan that changed: a worker that found too little memory."""
    return [f"the plan changed: {change}" for change in (files.read_json(directory.plan) or {})["changes"]]


def start(runs: Runs, name: str, job: FinetuneJob) -> LiveRun:
    """`spotune run` on a folder of its own."""
    run = LiveRun(runs.empty(name), job, patience_seconds=400)
    run.start()
    return run


def finish(run: LiveRun) -> None:
    """Wait for its end, which has to be that of a trained model."""
    try:
        code, output = run.wait()
    finally:
        run.end()
    assert code == 0, output[-4000:]


def main() -> int:
    """Play, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="schedules, multiples of 8: one worker")
    parser.add_argument("--jobs", type=int, default=3, help="schedules at a time")
    parser.add_argument("--control", type=int, help="play this seed without `deterministic`, which is to be found")
    parser.add_argument("--without-large", action="store_true", help="the small model alone")
    parser.add_argument("--work", type=Path, help="folder of the runs, kept where something fails; new")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        **{name: version(name) for name in ("ray", "torch", "deepspeed", "transformers")},
    }
    runs = Runs(options.work or Path(tempfile.mkdtemp()))
    runs.root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        stages = {make_schedule(seed).zero_stage for seed in options.seeds}
        references = {stage: UndisturbedCommand(runs, small_job(runs.root, stage)) for stage in stages}
        for record in pool.map(lambda seed: prove(references[make_schedule(seed).zero_stage], seed), options.seeds):
            found.setdefault("schedules", []).append(record)
            publish(found, options.output)
    if options.control is not None:
        job = small_job(runs.root, make_schedule(options.control).zero_stage, deterministic=False)
        found["controlWithAnyKernels"] = prove(UndisturbedCommand(runs, job), options.control)
        publish(found, options.output)
    if not options.without_large:
        found["large"] = kill_large(runs)
        publish(found, options.output)
    if not is_as_promised(found):
        print(f"NOT AS PROMISED: the runs are in {runs.root}")
        return 1
    shutil.rmtree(runs.root)
    return 0


def is_as_promised(found: Mapping[str, Any]) -> bool:
    """Whether nothing was found but in the control."""
    good = not any(record["findings"] for record in found.get("schedules", []))
    if "controlWithAnyKernels" in found:
        good = good and bool(found["controlWithAnyKernels"]["findings"])
    if "large" in found:
        large = found["large"]
        good = good and not large["findings"] and all(large[name] for name in EQUAL)
    return good


if __name__ == "__main__":
    sys.exit(main())
