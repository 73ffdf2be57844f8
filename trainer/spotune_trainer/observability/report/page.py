"""The report's page: one file with nothing outside of it, no script, and colours for light and dark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from spotune.formatting import score, scores_of
from spotune_trainer.observability.report.charts import Bar, Line, duration, line_chart, parts_bar, timeline
from spotune_trainer.observability.report.run_summary import Story, Stretch, read_story

_KINDS = {"left": "left", "done": "done", "preempted": "left", "": "runs"}
"""Class of a worker group by its ending; any other is a loss."""
_LEGEND = {"done": "exported", "runs": "runs, or was told to stop", "left": "left in time", "lost": "lost"}
_OF_THE_PLAN = ("zeroStage", "microBatchSize", "gradientCheckpointing", "reason", "fingerprint", "libraries", "changes")


def report_of_directory(root: Path) -> str:
    """The page about the job in a folder.

    Raises:
        UsageError: There is no job in it.
    """
    return render_page(read_story(root))


def render_page(story: Story) -> str:
    """The report of a job as HTML."""
    environment = Environment(
        loader=PackageLoader("spotune_trainer.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(duration=duration, number=_number, score=score, judged=_judged)
    plan = {name: story.plan[name] for name in _OF_THE_PLAN if story.plan.get(name) not in (None, [], {})}
    return environment.get_template("page.html").render(
        story=story,
        phase=story.status.get("phase", "Starting"),
        told=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.told)),
        message=story.status.get("message") or story.status.get("checkpointProblem"),
        figures=list(_figures(story)),
        evaluations=[(each, scores_of(each)) for each in story.evaluations],
        metrics=_metrics(story),
        predictions=story.evaluations[-1].get("predictions", []) if story.evaluations else [],
        curves=[chart for chart in _curves(story) if chart],
        groups=_groups(story),
        parts=parts_bar("", story.status.get("goodputParts") or {}),
        plan=_yaml(plan) if plan else "",
        job=_yaml(story.job),
    )


def _figures(story: Story) -> Iterator[tuple[str, str]]:
    """Names and values of what is known."""
    status, result = story.status, story.result
    step, total = status.get("step"), status.get("totalSteps")
    figures = {
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
        "time to go": duration(status["etaSeconds"]) if status.get("etaSeconds") else "",
    }
    return ((name, text) for name, text in figures.items() if text)


def _metrics(story: Story) -> dict[str, str]:
    """Titles by metric of all scores in the evaluations."""
    return {metric: score(metric, value)[0] for each in story.evaluations for metric, value in scores_of(each).items()}


def _curves(story: Story) -> Iterator[str]:
    def of_steps(key: str) -> list[tuple[float, float]]:
        return [(step["step"], float(step[key])) for step in story.steps if step.get(key) is not None]

    evaluated = [(each["step"], each["loss"]) for each in story.evaluations if each.get("loss") is not None]
    yield line_chart("Loss", [Line("training", of_steps("loss")), Line("evaluation", evaluated, dotted=True)])
    rate = [(step["step"], step["tokens"] / step["seconds"]) for step in story.steps if step.get("seconds")]
    yield line_chart("Label tokens per second", [Line("tokens/s", rate)])
    yield line_chart("Norm of the gradient", [Line("norm", of_steps("gradNorm"))])
    yield line_chart("Learning rate", [Line("rate", of_steps("learningRate"))])
    yield line_chart("Model FLOPs utilisation", [Line("MFU", of_steps("mfu"))])


def _groups(story: Story) -> str:
    most = max((each.world_size for each in story.stretches), default=1)
    bars = [
        Bar(
            each.start,
            each.start + each.seconds(story.told),
            each.world_size / most,
            _KINDS.get(each.ending, "lost"),
            _label(each),
        )
        for each in story.stretches
    ]
    commits = [each["time"] for each in story.commits]
    return timeline("Workers over time, and a tick for each commit", bars, commits, _LEGEND)


def _label(stretch: Stretch) -> str:
    return f"group {stretch.generation}: {stretch.world_size} workers from step {stretch.first_step:,}. {stretch.why}"


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _judged(scores: Mapping[str, bool | float | None]) -> str:
    """The metrics that an answer is right by, and its scores by the others."""
    right = [metric for metric, value in scores.items() if value is True]
    scored = {metric: value for metric, value in scores.items() if isinstance(value, float)}
    return ", ".join([*right, *(f"{metric} {value:.4g}" for metric, value in scored.items())])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
