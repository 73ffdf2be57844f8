"""What follows the last step: evaluation, export, and the summary of the run. Also evaluation between steps."""

from __future__ import annotations

import logging
import resource
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from spotune.errors import SpotuneError
from spotune.formatting import scores_of
from spotune.job import HarnessSpec
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.folders import pull_generation_logs
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.generations import raise_if_superseded, surviving_steps
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.reader import fetch, read_ema, read_trained_weights
from spotune_trainer.data.schedule import Schedule
from spotune_trainer.engine.zero_state import evaluation_weights
from spotune_trainer.evaluation.evaluate import EvaluationResult, Prediction, evaluate
from spotune_trainer.evaluation.harness import evaluate_export, harness_scores
from spotune_trainer.evaluation.metrics import METRICS
from spotune_trainer.evaluation.ranks import RankGroup
from spotune_trainer.evaluation.task_scores import score_tasks
from spotune_trainer.export.huggingface import export_model
from spotune_trainer.export.model_card import model_card
from spotune_trainer.export.to_bucket import upload_exports, upload_model_card
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import label_tokens_of, tokens_of, training_seconds_of
from spotune_trainer.training.context import TrainContext
from spotune_trainer.training.evaluations import Evaluations
from spotune_trainer.training.failures import evaluating

logger = logging.getLogger("spotune.worker")

_SHOWN_CHARACTERS = 1000


def finalize(
    context: TrainContext, checkpoint: CheckpointName, evaluations: Evaluations, release: Callable[[], None]
) -> dict[str, Any]:
    """Evaluate and export the trained model. All ranks call it together; rank 0 exports.

    Args:
        context: of the rank.
        checkpoint: of the last step.
        evaluations: so far; they choose the checkpoint that is exported.
        release: frees the engine, which the export does not need. Called on rank 0 after the evaluation.

    Returns:
        The summary for `result.json`, complete on rank 0.

    Raises:
        SupersededError: a later generation has started; nothing is exported.
    """
    evaluation = evaluations.evaluate_last(checkpoint.step)
    summary: dict[str, Any] = {
        "peakMemoryBytes": _peak_memory_bytes(context.control),
        **(_evaluation_summary(evaluation) if evaluation else {}),
        **evaluations.summary(),
    }
    if context.rank != 0:
        return summary
    if (bucket := bucket_of(context.directory)) is not None:
        refresh(bucket, context.directory)
        pull_generation_logs(bucket, context.directory)  # of generations on other machines
    summary |= summarize_steps(surviving_steps(context.directory), context.datasets.schedule)
    context.reporter.set_phase(Phase.EXPORTING)
    raise_if_superseded(context.directory, context.task.generation)
    device = str(context.engine.device)
    release()
    chosen = evaluations.choose_export(checkpoint)
    step = chosen.checkpoint.name.step
    fetch(chosen.checkpoint, heartbeat=context.reporter.heartbeat)
    summary |= {"exportStep": step, "exportProblem": chosen.problem}
    if chosen.evaluation is not None:  # the results are those of the exported model
        summary |= _summary_of_earlier(chosen.evaluation)
        context.reporter.update(evalLoss=chosen.evaluation.loss, evalStep=chosen.evaluation.step)
        if "evalBySource" in summary:
            summary["evalBySource"] = by_source = chosen.evaluation.by_source or None
            context.reporter.update(evalBySource=by_source)
    context.reporter.update(evalScores=scores_of(summary))
    if context.job.spec.training.ema_decay:  # first, because `export` is what a finished run is known by
        export_model(
            read_ema(chosen.checkpoint, context.reporter.heartbeat),
            context.job,
            context.directory.export_ema,
            {"steps": summary["steps"]},
            step=step,
            before_replacing=lambda: raise_if_superseded(context.directory, context.task.generation),
            heartbeat=context.reporter.heartbeat,
        )
    sha256 = export_model(
        read_trained_weights(chosen.checkpoint, context.job.spec.training, context.reporter.heartbeat),
        context.job,
        context.directory.export,
        summary,
        step=step,
        keep_previous=True,
        before_replacing=lambda: raise_if_superseded(context.directory, context.task.generation),
        heartbeat=context.reporter.heartbeat,
    )
    upload_exports(context.directory, context.reporter.heartbeat)
    context.reporter.update(exportStep=step, exportProblem=chosen.problem)
    context.reporter.record_event("exported", sha256=sha256, step=step)
    summary["exportSha256"] = sha256
    harness = context.job.spec.training.evaluation.harness
    return summary | (_run_harness(context, harness, device, summary) if harness is not None else {})


def _run_harness(context: TrainContext, spec: HarnessSpec, device: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the export on the tasks of lm-evaluation-harness; returns the fields of the summary that change.

    The model is trained and exported, so an error does not fail the run. `harnessProblem` says what happened.
    """
    context.reporter.set_phase(Phase.EVALUATING)
    try:
        results = evaluate_export(
            spec,
            context.directory.export,
            device=device,
            batch_size=_tasks_batch_size(context),
            heartbeat=context.reporter.heartbeat,
        )
    except SpotuneError as error:
        problem = f"{error}. The model is trained and exported without these scores"
        logger.warning("%s", problem)
        context.reporter.update(harnessProblem=problem)
        context.reporter.record_event("harness-failed", step=summary["exportStep"], reason=problem)
        return {"harnessProblem": problem}
    raise_if_superseded(context.directory, context.task.generation)
    scores = harness_scores(results)
    files.write_json(context.directory.harness, results)
    changed = {"scores": {**summary.get("scores", {}), **scores}}
    card = model_card(context.job, {**summary, **changed})
    files.write_text(context.directory.export / "README.md", card)
    upload_model_card(context.directory)
    context.reporter.update(evalScores=scores_of({**summary, **changed}), harnessProblem=None)
    context.reporter.record_event("harness", step=summary["exportStep"], scores=scores)
    return changed


def run_evaluation(context: TrainContext, step: int) -> EvaluationResult | None:
    """Evaluate the model after `step` optimizer steps, on all ranks; None if the job has no evaluation data."""
    if context.datasets.evaluation is None:
        return None
    context.reporter.set_phase(Phase.EVALUATING)
    batch_size = context.plan.evaluation_batch_size(context.job.spec.training.evaluation.batch_size)
    with evaluating(batch_size), evaluation_weights(context.engine):
        result = evaluate(
            context.engine.module,
            context.datasets.evaluation,
            context.tokenizer,
            context.job,
            batch_size=batch_size,
            sample_ids=context.datasets.evaluation_ids.tolist(),
            sources={name: ids.tolist() for name, ids in context.datasets.evaluation_by_source.items()},
            ranks=RankGroup(context.rank, context.world_size, context.control),
            zero_stage=context.engine.zero_optimization_stage(),
            heartbeat=context.reporter.heartbeat,
            reference_log_probs=context.references.evaluation,
        )
    by_source = _scores_by_source(result)
    context.reporter.update(evalLoss=result.loss, evalStep=step, **by_source)
    context.reporter.record_event(
        "evaluated",
        step=step,
        loss=result.loss,
        **_scores(result),
        **by_source,
        samples=result.samples,
        predictions=[_shortened(prediction) for prediction in result.predictions],
    )
    return result


def run_tasks(context: TrainContext, step: int) -> Mapping[str, float]:
    """Scores of the tasks of lm-evaluation-harness after `step` optimizer steps, on all ranks; empty if they fail.

    A task that fails does not end the training. `harnessProblem` says what happened.
    """
    spec = context.job.spec.training.evaluation.harness
    assert spec is not None
    context.reporter.set_phase(Phase.EVALUATING)
    batch_size = _tasks_batch_size(context)
    with evaluating(batch_size), evaluation_weights(context.engine):
        result = score_tasks(
            spec,
            context.engine.module,
            context.tokenizer,
            pretrained=context.job.spec.model.initialise == "pretrained",
            batch_size=batch_size,
            ranks=RankGroup(context.rank, context.world_size, context.control),
            zero_stage=context.engine.zero_optimization_stage(),
            heartbeat=context.reporter.heartbeat,
            silent_seconds=context.job.spec.retry.hang_timeout.seconds,
        )
    problem = f"after step {step}: {result.problem}" if result.problem is not None else None
    context.reporter.update(harnessProblem=problem)
    if problem is None:
        context.reporter.record_event("harness", step=step, scores=dict(result.scores))
    else:
        logger.warning("%s", problem)
        context.reporter.record_event("harness-failed", step=step, reason=problem)
    return result.scores


def _tasks_batch_size(context: TrainContext) -> int:
    """Requests of lm-evaluation-harness in a forward pass."""
    settings = context.job.spec.training.evaluation
    assert settings.harness is not None
    return context.plan.evaluation_batch_size(settings.harness.batch_size or settings.batch_size)


def _shortened(prediction: Prediction) -> dict[str, Any]:
    """A prediction for the event log, its texts cut to a length that people read."""
    texts = {"prompt": prediction.prompt, "prediction": prediction.prediction, "reference": prediction.reference}
    return {name: textwrap.shorten(text, _SHOWN_CHARACTERS) for name, text in texts.items()} | {
        "scores": dict(prediction.scores)
    }


def summarize_steps(records: Sequence[Mapping[str, Any]], schedule: Schedule) -> dict[str, Any]:
    """Summary of the steps that led to the model: their number, samples, mean loss, and rates while training.

    The time of evaluations and the wait for checkpoints do not count for the rates; the wait for data does.

    Args:
        records: one for each step, as in `steps.jsonl`. Older files have label tokens only: `tokens` is then None, and
            the rate is that of the newer steps.
        schedule: of the run; says how many samples the steps had.
    """
    steps = len(records)
    samples = schedule.samples_before(steps)
    by_source = schedule.samples_by_source(steps)
    seconds = sum(map(training_seconds_of, records))
    counted = [(tokens, training_seconds_of(record)) for record in records if (tokens := tokens_of(record)) is not None]
    counted_tokens, counted_seconds = sum(tokens for tokens, _ in counted), sum(seconds for _, seconds in counted)
    losses = [record["loss"] for record in records if record["loss"] is not None]
    measured = [(record["mfu"], training_seconds_of(record)) for record in records if record["mfu"] is not None]
    measured_seconds = sum(seconds for _, seconds in measured)
    return {
        "steps": steps,
        "samples": samples,
        **({"samplesBySource": by_source} if by_source else {}),
        "tokens": counted_tokens if len(counted) == steps else None,
        "labelTokens": sum(label_tokens_of(record) for record in records),
        "trainLoss": sum(losses) / len(losses) if losses else None,
        "tokensPerSecond": round(counted_tokens / counted_seconds, 1) if counted_seconds else None,
        "samplesPerSecond": round(samples / seconds, 1) if seconds else None,
        "mfu": round(sum(mfu * seconds for mfu, seconds in measured) / measured_seconds, 4)
        if measured_seconds
        else None,
    }


def _evaluation_summary(result: EvaluationResult) -> dict[str, Any]:
    return {"evalLoss": result.loss, **_scores(result), **_scores_by_source(result)}


def _scores_by_source(result: EvaluationResult) -> dict[str, Any]:
    """Under `evalBySource`, loss and scores of each source of a mixture; nothing without a mixture."""
    found = result.values_by_source
    return {"evalBySource": found} if found else {}


def _summary_of_earlier(evaluation: Evaluation) -> dict[str, Any]:
    """The fields of `_evaluation_summary` for an evaluation of the history, with scores of lm-evaluation-harness."""
    built_in = {name: evaluation.scores.get(name) for name in METRICS}
    custom = {name: score for name, score in evaluation.scores.items() if name not in METRICS}
    return {"evalLoss": evaluation.loss, **built_in, "scores": custom}


def _scores(result: EvaluationResult) -> dict[str, Any]:
    """Built-in metrics (None if not requested), and under `scores` those of the user's functions, by name."""
    built_in = {"exactMatch": result.exact_match, "executionAccuracy": result.execution_accuracy}
    return {**built_in, "scores": result.custom_scores}


def _peak_memory_bytes(control: Any) -> int:
    """Peak memory of the rank that used most: memory of its GPU, or, without GPUs, the resident set of its process."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = torch.tensor([peak], dtype=torch.int64)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=control)
    return int(largest.item())
