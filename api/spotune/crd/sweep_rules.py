"""CEL rules of FinetuneSweeps that span several fields: the models' checks, and what is immutable after a trial.

Rules cannot read `values` of a parameter, whose items have no type. The models alone check that exactly one form is
set, that no value is listed twice, how large a grid is, and that every trial is a valid job.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import NAME_RULES, Rule
from spotune.crd.job_rules import JOB_RULES
from spotune.job import FinetuneJob
from spotune.job.lifecycle import TTL_LOSES_TRIALS
from spotune.job.training.metric import ALL_OBJECTIVE_METRICS, BUILT_IN, OBJECTIVE_METRICS, lower_is_better
from spotune.sweep import MAX_SWEEP_NAME_LENGTH, FinetuneSweep, FinetuneSweepSpec, ObjectiveSpec, ParameterSpec
from spotune.sweep import TrialPruningSpec as _Pruning
from spotune.sweep.parameters import NOT_SEARCHED, SEARCHED_SECTIONS

_KNOWN: Final = (*BUILT_IN, *ALL_OBJECTIVE_METRICS)
_TEMPLATE: Final = "self.template.spec"
_HARNESS: Final = (
    f"(self.objective.metric.contains('/') && has({_TEMPLATE}.training.evaluation.harness) && "
    "self.earlyStopping.algorithm == 'none')"
)
_FUNCTION: Final = f"({_TEMPLATE}.training.function != '' || size({_TEMPLATE}.training.command) > 0)"

_PARAMETER = (
    Rule(
        "[has(self.uniform), has(self.logUniform), has(self.integer)].filter(given, given).size() <= 1",
        "set exactly one of values, uniform, logUniform and integer",
    ),
    *(
        Rule(
            f"!has(self.{name}) || self.{name}[0] < self.{name}[1]",
            "must be ascending: the lowest value, then the highest",
            name,
        )
        for name in ("uniform", "logUniform", "integer")
    ),
    Rule(
        "!has(self.logUniform) || self.logUniform[0] > 0.0",
        "must be more than 0: use uniform for other numbers",
        "logUniform",
    ),
)

_OBJECTIVE = (
    Rule(
        f"self.mode != 'maximize' || !(self.metric in {[each for each in _KNOWN if lower_is_better(each)]})",
        "lower values of this metric are better: remove this field",
        "mode",
    ),
    Rule(
        f"self.mode != 'minimize' || !(self.metric in {[each for each in _KNOWN if not lower_is_better(each)]})",
        "higher values of this metric are better: remove this field",
        "mode",
    ),
)

_PRUNING = (
    Rule(
        "self.algorithm != 'asha' || has(self.minSteps)",
        "is required by asha: set the number of steps after which trials are compared",
        "minSteps",
    ),
)


def _starts_with(path: str, prefixes: Sequence[str]) -> str:
    return " || ".join(f"{path}.startsWith('{prefix}')" for prefix in prefixes)


_SEARCH = (
    Rule(
        f"self.parameters.all(path, {_starts_with('path', [f'{section}.' for section in SEARCHED_SECTIONS])})",
        f"does not define what is trained: use fields of {', '.join(SEARCHED_SECTIONS)}",
        "parameters",
    ),
    Rule(
        "!self.parameters.exists(path, "
        f"path in {list(NOT_SEARCHED)} || {_starts_with('path', [f'{field}.' for field in NOT_SEARCHED])})",
        "changes how trials are evaluated: they could not be compared",
        "parameters",
    ),
    Rule(
        "self.search.algorithm != 'grid' || "
        "self.parameters.all(path, !has(self.parameters[path].uniform) && !has(self.parameters[path].logUniform))",
        "has infinitely many values, and grid tries all of them: use values, integer, or tpe",
        "parameters",
    ),
    Rule(
        "self.search.algorithm == 'grid' || has(self.search.trials)",
        "is required by random and tpe: set the number of trials",
        "search.trials",
    ),
)

_JOB = (
    Rule(f"!{_TEMPLATE}.suspend", "is set by the sweep: use spec.suspend", "template.spec.suspend"),
    Rule(
        f"!has({_TEMPLATE}.serving)",
        "would serve every trial: write a ModelService for the best one",
        "template.spec.serving",
    ),
    Rule(
        f"!has({_TEMPLATE}.ttlSecondsAfterFinished)",
        TTL_LOSES_TRIALS,
        "template.spec.ttlSecondsAfterFinished",
    ),
    Rule(
        f"!has({_TEMPLATE}.output.hub)",
        "would be overwritten by every trial: upload the best one at the end",
        "template.spec.output.hub",
    ),
    Rule(
        f"{_FUNCTION} || !has({_TEMPLATE}.dataset) || has({_TEMPLATE}.dataset.eval) || "
        f"{_TEMPLATE}.dataset.mixture.exists(source, has(source.eval))",
        "is required, because trials are compared by evaluations: set source or fraction",
        "template.spec.dataset.eval",
    ),
    Rule(
        f"{_FUNCTION} || {_HARNESS} || self.objective.metric == 'loss' || "
        f"{_TEMPLATE}.training.evaluation.metrics.exists(one, "
        "one.substring(one.indexOf(':') + 1) == self.objective.metric) || "
        + " || ".join(
            f"({_TEMPLATE}.training.objective == '{objective}' && self.objective.metric in {list(metrics)})"
            for objective, metrics in OBJECTIVE_METRICS.items()
            if metrics
        ),
        "is not evaluated: add it to template.spec.training.evaluation.metrics",
        "objective.metric",
    ),
    Rule(
        f"{_FUNCTION} || self.earlyStopping.algorithm == 'none' || {_TEMPLATE}.training.evaluation.everySteps > 0",
        "must be at least 1, because earlyStopping compares evaluations during training",
        "template.spec.training.evaluation.everySteps",
    ),
)

_FROZEN: Final = (
    *("spec.parameters", "spec.search.algorithm", "spec.search.seed", "spec.objective", "spec.earlyStopping"),
    "spec.template",
)
_NO_TRIAL_YET: Final = "!has(self.status) || !has(self.status.trials) || self.status.trials.size() == 0"


def _freeze_rules() -> Iterator[Rule]:
    """Rules that make the search and its trials immutable after the first trial, so that all can be compared."""
    for path in _FROZEN:
        yield Rule(
            f"{_NO_TRIAL_YET} || self.{path} == oldSelf.{path}",
            "is immutable after the first trial: undo the change, or create a sweep with another name",
            path,
            "FieldValueForbidden",
        )


_NAME = Rule(
    f"self.metadata.name.size() <= {MAX_SWEEP_NAME_LENGTH}",
    f"metadata.name: {MAX_SWEEP_NAME_LENGTH} characters at most, because names of trials are made from it",
)

SWEEP_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    **{section: rules for section, rules in JOB_RULES.items() if section is not FinetuneJob},
    ParameterSpec: _PARAMETER,
    ObjectiveSpec: _OBJECTIVE,
    _Pruning: _PRUNING,
    FinetuneSweepSpec: (*_SEARCH, *_JOB),
    FinetuneSweep: (*NAME_RULES[1:], _NAME, *_freeze_rules()),
}
"""CEL rules of a FinetuneSweep by section; those of its template are the rules of a FinetuneJob."""
