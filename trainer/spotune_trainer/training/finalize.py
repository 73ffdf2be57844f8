"""What follows the last step: evaluation, export, and the figures of the run."""

from __future__ import annotations

import resource
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from spotune_trainer.checkpoint.generations import refuse_superseded, surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, open_checkpoint
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.evaluation.evaluate import EvaluationResult, Prediction, Ranks, evaluate
from spotune_trainer.export.huggingface import export_model
from spotune_trainer.observability.progress import Phase

if TYPE_CHECKING:
    from spotune_trainer.training.worker import Worker

_SHOWN_CHARACTERS = 1000


def finish(worker: Worker) -> dict[str, Any]:
    """Evaluate and export the trained model; the figures for `result.json`, complete on rank 0."""
    evaluation = evaluate_now(worker, worker.total_steps)
    figures: dict[str, Any] = {
        "peakMemoryBytes": _peak_memory_bytes(worker),
        **(_evaluation_figures(evaluation) if evaluation else {}),
    }
    if worker.rank != 0:
        return figures
    figures |= step_figures(surviving_steps(worker.directory), worker.datasets.schedule)
    worker.journal.enter(Phase.EXPORTING)
    checkpoint = open_checkpoint(worker.directory.checkpoints / str(worker.final_checkpoint()))
    assert isinstance(checkpoint, Checkpoint)
    refuse_superseded(worker.directory, worker.task.generation)
    worker.release()
    sha256 = export_model(read_parameters(checkpoint), worker.job, worker.directory.export, figures)
    worker.journal.event("exported", sha256=sha256)
    return {**figures, "exportSha256": sha256}


def evaluate_now(worker: Worker, step: int) -> EvaluationResult | None:
    """Evaluate after `step` optimizer steps, on all ranks; None where the job evaluates nothing."""
    if worker.datasets.evaluation is None:
        return None
    worker.journal.enter(Phase.EVALUATING)
    result = evaluate(
        worker.engine.module,
        worker.datasets.evaluation,
        worker.tokenizer,
        worker.job,
        batch_size=worker.plan.evaluation_batch_size,
        sample_ids=worker.datasets.evaluation_ids.tolist(),
        ranks=Ranks(worker.rank, worker.world_size, worker.control),
        zero_stage=worker.engine.zero_optimization_stage(),
        heartbeat=worker.journal.beat,
    )
    worker.journal.set(evalLoss=result.loss, evalScores=result.known_scores)
    worker.journal.event(
        "evaluated",
        step=step,
        loss=result.loss,
        **_scores(result),
        samples=result.samples,
        predictions=[_shown(prediction) for prediction in result.predictions],
    )
    return result


def _shown(prediction: Prediction) -> dict[str, Any]:
    """An answer for people, no text of it longer than they would read."""
    texts = {"prompt": prediction.prompt, "prediction": prediction.prediction, "reference": prediction.reference}
    return {name: textwrap.shorten(text, _SHOWN_CHARACTERS) for name, text in texts.items()} | {
        "scores": dict(prediction.scores)
    }


def step_figures(records: Sequence[Mapping[str, Any]], schedule: SampleSchedule) -> dict[str, Any]:
    """Figures over the steps that led to the model: their number, samples, mean loss, and rates while training."""
    steps = len(records)
    epochs, rest = divmod(steps, schedule.steps_per_epoch)
    samples = epochs * schedule.num_samples + rest * schedule.global_batch_size
    seconds = sum(record["seconds"] for record in records)
    losses = [record["loss"] for record in records if record["loss"] is not None]
    used = [record["mfu"] * record["seconds"] for record in records if record["mfu"] is not None]
    return {
        "steps": steps,
        "samples": samples,
        "trainLoss": sum(losses) / max(len(losses), 1),
        "tokensPerSecond": round(sum(record["tokens"] for record in records) / seconds, 1) if seconds else None,
        "samplesPerSecond": round(samples / seconds, 1) if seconds else None,
        "mfu": round(sum(used) / seconds, 4) if used else None,
    }


def _evaluation_figures(result: EvaluationResult) -> dict[str, Any]:
    return {"evalLoss": result.loss, **_scores(result)}


def _scores(result: EvaluationResult) -> dict[str, Any]:
    """Scores of the metrics that we have, None where not asked for, and `scores` of the user's functions by name."""
    ours = {"exactMatch": result.exact_match, "executionAccuracy": result.execution_accuracy}
    return {**ours, "scores": result.own_scores}


def _peak_memory_bytes(worker: Worker) -> int:
    """Largest memory of any rank: the device's where there is one, else the process's resident set."""
    if torch.cuda.is_available():
        mine = torch.cuda.max_memory_allocated()
    else:
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = torch.tensor([mine], dtype=torch.int64)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX, group=worker.control)
    return int(most.item())
