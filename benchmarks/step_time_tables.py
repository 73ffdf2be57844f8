"""The tables of planned step times in docs/benchmarks.md: what is predicted within 15 %, and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_rows_tables import percent
from benchmarks.step_time import by_configuration, error
from tests.trainer.support.planned_runs import RESULTS, STEPS_NOT_PREDICTED, runs_with_step_time

FITTED = RESULTS / "step_time.json"


@dataclass(frozen=True)
class StepTimeTable:
    """One line for each configuration: seconds of its newest run, and errors in the mean of its runs."""

    file: Path = FITTED

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        left_out: dict[str, Any] = json.loads(self.file.read_text())["errors"]
        yield "| configuration | runs | step, measured | planned | difference, mean | if left out of the fit |"
        yield "|---|---|---|---|---|---|"
        runs = [run for run in runs_with_step_time() if (run.output, run.number) not in STEPS_NOT_PREDICTED]
        for name, those in by_configuration(runs).items():
            measured = those[-1].case["stepSeconds"]
            planned = measured * (1 + error(those[-1]))
            mean = sum(map(error, those)) / len(those)
            other = left_out.get(name, {}).get("leftOut")
            cells = [name, str(len(those)), _seconds(measured), _seconds(planned), _signed(mean)]
            yield f"| {' | '.join(cells)} | {'' if other is None else _signed(other)} |"


@dataclass(frozen=True)
class NotPredictedTable:
    """One line for each run whose step time is not predicted, with the reason."""

    def lines(self) -> Iterator[str]:
        """The lines of a Markdown table."""
        yield "| run | step, measured | planned | why |"
        yield "|---|---|---|---|"
        for run in runs_with_step_time():
            reason = STEPS_NOT_PREDICTED.get((run.output, run.number))
            if reason is not None:
                step = run.planned_step()
                name = run.case.get("name") or f"{run.case['size']} of {run.output}"
                planned = "no estimate" if step is None else _seconds(step.seconds)
                yield f"| {name} | {_seconds(run.case['stepSeconds'])} | {planned} | {reason} |"


TABLES: dict[str, StepTimeTable | NotPredictedTable] = {
    "step-times": StepTimeTable(),
    "step-times-not-predicted": NotPredictedTable(),
}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _signed(fraction: float) -> str:
    return f"{'-' if fraction < 0 else '+'}{percent(abs(fraction))}"
