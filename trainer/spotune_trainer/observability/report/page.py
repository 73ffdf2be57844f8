"""Render the report: one HTML file without scripts or external resources, with light and dark colours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from spotune.formatting import score, scores_of
from spotune_trainer.observability.progress import tokens_of
from spotune_trainer.observability.report.charts import (
    Bar,
    Line,
    duration,
    line_chart,
    parts_bar,
    timeline,
)
from spotune_trainer.observability.report.run_summary import RunSummary, WorkerGroup, read_summary
from spotune_trainer.observability.report.training_data import data_sections

_GROUP_CLASSES = {"left": "left", "done": "done", "preempted": "left", "": "runs"}
"""CSS class of a worker group by its outcome; any other outcome is a failure."""
_LEGEND = {"done": "finished", "runs": "running or stopped", "left": "exited after a commit", "lost": "lost or failed"}
_MAX_EVALUATIONS = 10
"""Number of evaluations whose answers are shown."""
_CHARTS_OF_OBJECTIVES = {
    "Rewards": ("rewardChosen", "rewardRejected", "rewardMargin"),
    "Accuracy": ("rewardAccuracy", "accuracy", "macroF1", "entityF1", "accuracyAt1", "mrr"),
    "Estimate of the KL divergence": ("kl",),
}
"""What objectives compute beside the loss, by the title of its chart."""
_LAYOUT_FIELDS = ("zeroStage", "microBatchSize", "gradientCheckpointing")
_PLAN_FIELDS = ("reason", "fingerprint", "libraries", "changes")


def report_of_directory(root: Path) -> str:
    """The HTML report of the job in the folder `root`.

    Raises:
        UsageError: The folder holds no job.
    """
    return render_page(read_summary(root))


def render_page(summary: RunSummary) -> str:
    """The report as HTML."""
    environment = Environment(
        loader=PackageLoader("spotune_trainer.observability.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(duration=duration, number=_number, score=score, metrics_of_answer=_metrics_of_answer)
    user_code = [field for field in ("function", "command") if summary.plan.get(field)]
    layout = user_code or _LAYOUT_FIELDS
    plan = {
        name: summary.plan[name] for name in (*layout, *_PLAN_FIELDS) if summary.plan.get(name) not in (None, [], {})
    }
    return environment.get_template("page.html").render(
        summary=summary,
        phase=summary.status.get("phase", "Starting"),
        updated=_utc(summary.updated),
        nodes=[(_utc(moment), message) for moment, message in summary.nodes],
        message=summary.status.get("message") or summary.status.get("checkpointProblem"),
        key_metrics=list(_key_metrics(summary)),
        evaluations=[(each, scores_of(each)) for each in summary.evaluations],
        score_titles=_score_titles(summary),
        questions=_questions(summary),
        curves=[chart for chart in _curves(summary) if chart],
        timeline=_timeline(summary),
        data=list(data_sections(summary.data)),
        parts=parts_bar("", summary.status.get("goodputParts") or {}),
        plan=_yaml(plan) if plan else "",
        job=_yaml(summary.job),
    )


def _key_metrics(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """(name, value) of each key metric that has a value."""
    status, result = summary.status, summary.result
    step, total = status.get("step"), status.get("totalSteps")
    values = {
        "step": f"{step:,} of {total:,}" if step is not None and total else "",
        "loss": _number(status.get("loss"), 4),
        "evaluation loss": _number(status.get("evalLoss"), 4),
        **dict(score(metric, value) for metric, value in scores_of(result).items()),
        "tokens/s": _number(result.get("tokensPerSecond", status.get("tokensPerSecond")), 0),
        "MFU": _share(result.get("mfu", status.get("mfu"))),
        "goodput": _share(status.get("goodput")),
        "restarts": f"{sum((status.get('restarts') or {}).values())}",
        "steps lost": _number(status.get("stepsLost"), 0),
        "wall clock": duration(sum((status.get("goodputParts") or {}).values())),
        "time left": duration(status["etaSeconds"]) if status.get("etaSeconds") else "",
    }
    return ((name, text) for name, text in values.items() if text)


def _questions(summary: RunSummary) -> list[dict[str, Any]]:
    """Each prompt with generated answers: its prompt, its reference, and its answers by step.

    Of many evaluations, `_MAX_EVALUATIONS` are shown, evenly spaced, with the first and the last.
    """
    evaluations = [each for each in summary.evaluations if each.get("predictions")]
    last = len(evaluations) - 1
    count = min(len(evaluations), _MAX_EVALUATIONS)
    shown = [evaluations[round(index * last / max(count - 1, 1))] for index in range(count)]
    questions: dict[tuple[str, str], dict[str, Any]] = {}
    for evaluation in shown:
        for each in evaluation["predictions"]:
            new = {"prompt": each["prompt"], "reference": each["reference"], "answers": []}
            question = questions.setdefault((each["prompt"], each["reference"]), new)
            question["answers"].append((evaluation["step"], each["prediction"], each["scores"]))
    return list(questions.values())


def _score_titles(summary: RunSummary) -> dict[str, str]:
    """Column titles of all scores in the evaluations, by metric."""
    return {
        metric: score(metric, value)[0] for each in summary.evaluations for metric, value in scores_of(each).items()
    }


def _curves(summary: RunSummary) -> Iterator[str]:
    def points_of(key: str) -> list[tuple[float, float]]:
        return [(step["step"], float(step[key])) for step in summary.steps if step.get(key) is not None]

    evaluated = [(each["step"], each["loss"]) for each in summary.evaluations if each.get("loss") is not None]
    yield line_chart("Loss", [Line("training", points_of("loss")), Line("evaluation", evaluated, dotted=True)])
    by_source = [(each["step"], each["evalBySource"]) for each in summary.evaluations if "evalBySource" in each]
    sources = list(dict.fromkeys(name for _, found in by_source for name in found))
    lines = [
        Line(name, [(step, found[name]["loss"]) for step, found in by_source if name in found], dotted=True)
        for name in sources
    ]
    yield line_chart("Evaluation loss by source", lines)
    scores = [(each["step"], scores_of(each)) for each in summary.evaluations]
    for title, names in _CHARTS_OF_OBJECTIVES.items():
        lines = []
        for name in names:
            scored = [(step, found[name]) for step, found in scores if name in found]
            lines += [Line(name, points_of(name)), Line(f"{name}, evaluation", scored, dotted=True)]
        yield line_chart(title, lines)
    rate = [
        (step["step"], tokens / step["seconds"])
        for step in summary.steps
        if step.get("seconds") and (tokens := tokens_of(step)) is not None
    ]
    yield line_chart("Tokens per second", [Line("tokens/s", rate)])
    yield line_chart("Gradient norm", [Line("norm", points_of("gradNorm"))])
    yield line_chart("Learning rate", [Line("rate", points_of("learningRate"))])
    yield line_chart("Model FLOPs utilisation", [Line("MFU", points_of("mfu"))])
    reported = dict.fromkeys(name for step in summary.steps for name in step.get("metrics", {}) if name != "loss")
    for name in reported:
        points = [(step["step"], step["metrics"][name]) for step in summary.steps if name in step.get("metrics", {})]
        yield line_chart(name, [Line("reported", points)])


def _timeline(summary: RunSummary) -> str:
    largest = max((group.world_size for group in summary.groups), default=1)
    bars = [
        Bar(
            group.start,
            group.start + group.seconds(summary.updated),
            group.world_size / largest,
            _GROUP_CLASSES.get(group.outcome, "lost"),
            _label(group),
        )
        for group in summary.groups
    ]
    commits = [each["time"] for each in summary.commits]
    return timeline("Number of workers over time; ticks below are commits", bars, commits, _LEGEND)


def _label(group: WorkerGroup) -> str:
    return f"group {group.generation}: {group.world_size} workers from step {group.first_step:,}. {group.description}"


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True)


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _metrics_of_answer(scores: Mapping[str, bool | float | None]) -> str:
    """The metrics by which an answer is correct, and its scores by metrics with a scale."""
    correct = [metric for metric, value in scores.items() if value is True]
    scored = {metric: value for metric, value in scores.items() if isinstance(value, float)}
    return ", ".join([*correct, *(f"{metric} {value:.4g}" for metric, value in scored.items())])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
