"""The parameters of the next trial, by Optuna. Pure: a study is rebuilt from the trials so far, and kept nowhere.

The sampler of trial n is seeded by the sweep's seed and n. So the parameters depend on the spec and the trials so far,
and not on how often the operator was restarted. Optuna is imported when the first sweep is reconciled.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from spotune.sweep import FinetuneSweepSpec, ParameterSpec, SearchSpec, TrialStatus

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_SEED_BYTES: Final = 4


def suggest(spec: FinetuneSweepSpec, number: int, trials: Sequence[TrialStatus]) -> dict[str, Any]:
    """The parameters of a trial, by field of the job's spec.

    Args:
        spec: The sweep's.
        number: Number of the trial, from 0.
        trials: The trials so far.
    """
    paths = sorted(spec.parameters)  # the API server does not keep the order of fields
    if spec.search.algorithm == "grid":
        combinations = itertools.product(*(spec.parameters[path].all_values for path in paths))
        return dict(zip(paths, next(itertools.islice(combinations, number, None)), strict=True))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {path: _distribution(spec.parameters[path]) for path in paths}
    study = optuna.create_study(direction=spec.objective.direction, sampler=_sampler(spec.search, number))
    if spec.search.algorithm == "tpe":
        study.add_trials([frozen for trial in trials if (frozen := _frozen_trial(trial, distributions)) is not None])
    return dict(study.ask(fixed_distributions=distributions).params)


def _sampler(search: SearchSpec, number: int) -> BaseSampler:
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import RandomSampler, TPESampler

    digest = hashlib.blake2b(f"{search.seed}:{number}".encode(), digest_size=_SEED_BYTES).digest()
    seed = int.from_bytes(digest, "big")
    if search.algorithm == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=True)  # running trials count as bad: no two of them are alike


def _distribution(parameter: ParameterSpec) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.uniform is not None:
        return FloatDistribution(parameter.uniform[0], parameter.uniform[1])
    if parameter.log_uniform is not None:
        return FloatDistribution(parameter.log_uniform[0], parameter.log_uniform[1], log=True)
    if parameter.integer is not None:
        return IntDistribution(parameter.integer[0], parameter.integer[1])
    return CategoricalDistribution(parameter.all_values)


def _frozen_trial(trial: TrialStatus, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial | None:
    """A trial of the status as Optuna has it; None if its parameters are not of this search space."""
    from optuna.trial import TrialState, create_trial

    states = {
        "Running": TrialState.RUNNING,
        "Complete": TrialState.COMPLETE,
        "Pruned": TrialState.PRUNED,
        "Failed": TrialState.FAIL,
    }
    try:
        return create_trial(
            state=states[trial.state],
            value=trial.value if trial.state == "Complete" else None,
            params=dict(trial.parameters),
            distributions=dict(distributions),
            intermediate_values={each.step: each.value for each in trial.evaluations},
        )
    except ValueError:  # somebody has edited the annotation of its job
        return None
