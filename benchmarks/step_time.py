"""Fits the rates of the plan's step times to the outputs of one H200, and leaves each configuration out in turn.

    PYTHONPATH=. python -m benchmarks.step_time --output benchmarks/results/step_time.json

Least squares over the logarithms of planned by measured seconds (Gauss-Newton with a numeric Jacobian). Runs of one
configuration count together as one. Runs that the plan does not predict (`STEPS_NOT_PREDICTED`) and deterministic ones,
which have slower attention, are left out of the fit. The rates of `step_profile_before.json` stay as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotune.plan.speed.step_time import RATES, Rates
from tests.trainer.support.measured import publish
from tests.trainer.support.planned_runs import STEPS_NOT_PREDICTED, MeasuredRun, runs_with_step_time

FITTED = (
    "attention_64",
    "attention_128",
    "attention_accesses",
    "packed_attention",
    "eager",
    "eager_layer_seconds",
    "fp8",
    "fp8_rowwise",
    "adapter_accesses",
    "dequantization_bytes",
    "host_bytes_per_second",
    "update_8bit_eager_bytes",
)
_ROUNDS = 8
_DIFFERENCE = 1e-4
_STIFFNESS = 0.002
"""Weight of keeping a rate as it is, so that one without any run keeps its value."""
Configurations = Mapping[str, Sequence[MeasuredRun]]


def configuration(run: MeasuredRun) -> str:
    """What distinguishes a run from those that count together with it."""
    case = run.case
    sections, execution = case["sections"], case["sections"].get("execution", {})
    optimizer = sections.get("training", {}).get("optimizer", "")
    parts = [
        case["size"],
        f"rows of {case['length']:,}",
        "" if case["compile"] else "not compiled",
        "" if case.get("precision") in (None, "bf16") else case["precision"],
        "LoRA" if "adapter" in sections else "",
        "nf4" if run.setup.quantised else "",
        optimizer,
        "recomputed layers" if case["gradientCheckpointing"] else "",
        "activations on the host" if case.get("offloadActivations") else "",
        "states on the host" if run.setup.offload != "none" else "",
        f"{case['documents']} documents" if (case.get("documents") or 1) > 1 else "",
        "attention by a mask" if execution.get("attention") == "sdpa" else "",
        "deterministic" if execution.get("deterministic") else "",
        f"ZeRO-{case['zeroStage']}" if run.world_size > 1 or case["zeroStage"] == 3 else "",
        f"{run.world_size} GPUs" if run.world_size > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def by_configuration(runs: Sequence[MeasuredRun]) -> Configurations:
    """The runs of each configuration."""
    found: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        found.setdefault(configuration(run), []).append(run)
    return found


def error(run: MeasuredRun, rates: Rates = RATES) -> float:
    """Planned by measured seconds, less 1."""
    step = run.planned_step(rates)
    assert step is not None, "the plan predicts this run"
    return float(step.seconds / run.case["stepSeconds"] - 1)


def fit(configurations: Configurations, start: Rates = RATES) -> Rates:
    """The rates with the least squares."""
    fixed = np.log([getattr(start, name) for name in FITTED])

    def rates_at(logarithms: NDArray[np.float64]) -> Rates:
        return replace(start, **dict(zip(FITTED, map(float, np.exp(logarithms)), strict=True)))

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = rates_at(logarithms)
        of_runs = [np.log1p(error(run, rates)) / len(runs) ** 0.5 for runs in configurations.values() for run in runs]
        return np.array([*of_runs, *(_STIFFNESS * (logarithms - fixed))])

    at = fixed.copy()
    for _ in range(_ROUNDS):
        here = residuals(at)
        columns = [(residuals(at + _DIFFERENCE * unit) - here) / _DIFFERENCE for unit in np.eye(len(FITTED))]
        at = at - np.linalg.lstsq(np.stack(columns, axis=1), here, rcond=None)[0]
    return rates_at(at)


def _mean(runs: Sequence[MeasuredRun], rates: Rates) -> float:
    return round(float(np.mean([error(run, rates) for run in runs])), 4)


def _waits(runs: Sequence[MeasuredRun]) -> bool:
    """Whether the GPU waits for the processor in these runs, by the plan."""
    return any((step := run.planned_step()) is not None and step.launches > 0 for run in runs)


def result() -> dict[str, Any]:
    """The fitted rates, and for each configuration the mean error of the plan, of the fit, and left out of the fit."""
    runs = [
        run
        for run in runs_with_step_time()
        if run.world_size == 1
        and (run.output, run.number) not in STEPS_NOT_PREDICTED
        and not run.case["sections"].get("execution", {}).get("deterministic")
    ]
    configurations = by_configuration(runs)
    fitted = fit(configurations)
    errors = {}
    for name, those in configurations.items():
        others = {other: kept for other, kept in configurations.items() if other != name}
        found: dict[str, float | None] = {"plan": _mean(those, RATES), "fitted": _mean(those, fitted)}
        # A rate that no other run depends on cannot be fitted without this one.
        is_alone = _waits(those) and not any(map(_waits, others.values()))
        errors[name] = found | {"leftOut": None if is_alone else _mean(those, fit(others, fitted))}
    kinds = ("plan", "fitted", "leftOut")
    sizes = {kind: [abs(value) for each in errors.values() if (value := each[kind]) is not None] for kind in kinds}
    return {
        "runs": len(runs),
        "rates": {name: float(f"{value:.4g}") for name, value in asdict(fitted).items()},
        "largest": {kind: max(found) for kind, found in sizes.items()},
        "mean": {kind: round(float(np.mean(found)), 4) for kind, found in sizes.items()},
        "errors": errors,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="File for the result as JSON.")
    publish(result(), parser.parse_args().output)
