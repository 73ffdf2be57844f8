"""Steps and evaluations for trackers: written to a job directory like workers do, and passed on like a driver does."""

from __future__ import annotations

from typing import Any

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.tracking.tracker import Tracker

STEPS = 9
LOSSES = [(step, 10 / step) for step in range(1, STEPS + 1)]
EVALUATIONS = [(3, 0.5), (6, 0.25), (9, 0.125)]


def evaluated(step: int, loss: float) -> dict[str, Any]:
    """An evaluation with two generated answers."""
    scored = [({"exactMatch": True, "bleu": 1.0}, "yes"), ({"exactMatch": False, "bleu": None}, f"<b>{step}</b> | no")]
    predictions = [
        {"prompt": f"question {number}", "prediction": answer, "reference": "yes", "scores": scores}
        for number, (scores, answer) in enumerate(scored)
    ]
    return {"step": step, "loss": loss, "predictions": predictions}


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 10 / step,
        "tokens": 100,
        "labelTokens": 60,
        "seconds": 0.5,
        "epoch": step / STEPS,
        "gradNorm": None,
    }


def write_steps(directory: JobDirectory, generation: int, steps: range) -> list[dict[str, Any]]:
    """Write the steps of a generation, and to the ledger an evaluation of every third step."""
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True, exist_ok=True)
    records = [record(step) for step in steps]
    for each in records:
        files.append_json(logs.steps, each)
    for step, loss in EVALUATIONS:
        if step in steps:
            Ledger(directory).append("evaluated", **evaluated(step, loss))
    return records


def feed(tracker: Tracker, directory: JobDirectory, generation: int, steps: range) -> None:
    """Call a tracker like the driver does while it reads the files of the workers."""
    for each in write_steps(directory, generation, steps):
        tracker.log_step(each)
        for step, loss in EVALUATIONS:
            if step == each["step"]:
                tracker.log_evaluation(evaluated(step, loss))
