"""Which trials are pruned: asynchronous successive halving (ASHA), by Optuna's pruner. Pure.

The rungs are minSteps, minSteps * reductionFactor, minSteps * reductionFactor^2 and so on. The value of a trial at a
rung is that of the first evaluation that the operator sees at this step or later. The trial continues if it is among
the best 1/reductionFactor of the values that are known at that rung at that moment; of the first trials there, the best
one continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spotune.sweep import TrialPruningSpec


def reached_rungs(pruning: TrialPruningSpec, step: int) -> int:
    """Number of rungs at or below a step; 0 without pruning."""
    if pruning.algorithm == "none" or pruning.min_steps is None:
        return 0
    count, rung = 0, pruning.min_steps
    while rung <= step:
        count, rung = count + 1, rung * pruning.reduction_factor
    return count


def rung_steps(pruning: TrialPruningSpec, rung: int) -> int:
    """Number of steps of a rung; the first one is 0."""
    return (pruning.min_steps or 0) * int(pruning.reduction_factor**rung)


def continues(
    value: float, others: Sequence[float], reduction_factor: int, direction: Literal["minimize", "maximize"]
) -> bool:
    """Whether a trial continues after a rung.

    Each rung is judged by a study of its own with that rung alone. So the result depends on the values, and on nothing
    that Optuna stores elsewhere.

    Args:
        value: Its value at the rung.
        others: Values of the other trials that have reached the rung.
        reduction_factor: Of the spec.
        direction: Whether lower or higher values are better.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=reduction_factor)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
    is_pruned = False
    for each in (*others, value):
        trial = study.ask()
        trial.report(each, step=1)
        is_pruned = trial.should_prune()
    return not is_pruned
