"""Names of evaluation metrics: the built-in ones, and the user's functions as package.module:function."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Final, Literal, get_args

from pydantic import StringConstraints

from spotune.custom_resource.base import expecting, with_cel_rules

BuiltIn = Literal["loss", "exactMatch", "executionAccuracy"]
BUILT_IN: Final[tuple[str, ...]] = get_args(BuiltIn)
MAX_METRICS: Final = 16

_REWARDS: Final = ("rewardChosen", "rewardRejected", "rewardMargin")
_REWARDS_OF_PAIRS: Final = (*_REWARDS, "rewardAccuracy")
STEP_STATISTICS: Final[Mapping[str, tuple[str, ...]]] = {
    "sft": (),
    "dpo": _REWARDS_OF_PAIRS,
    "orpo": _REWARDS_OF_PAIRS,
    "simpo": _REWARDS_OF_PAIRS,
    "kto": ("kl", *_REWARDS),
    "reward": _REWARDS_OF_PAIRS,
    "embedding": ("accuracyAt1", "mrr"),
    "classification": ("accuracy",),
    "tokenClassification": (),
}
"""What each objective computes beside the loss, in steps and in evaluations."""
OBJECTIVE_METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    **STEP_STATISTICS,
    "classification": ("accuracy", "macroF1"),
    "tokenClassification": ("accuracy", "entityF1"),
}
"""What the evaluations of each objective always have beside the loss, without `evaluation.metrics`."""
ALL_OBJECTIVE_METRICS: Final[tuple[str, ...]] = tuple(sorted({*chain(*OBJECTIVE_METRICS.values())}))
"""What evaluations of at least one objective always have beside the loss."""

MAX_METRIC_CHARACTERS: Final = 400
_MAX_CHARACTERS: Final = 200
_LOWER_IS_BETTER: Final = ("loss", "rewardRejected", "kl")
_PERPLEXITIES: Final = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_LOWER_IS_BETTER_IN_HARNESS: Final = (*_PERPLEXITIES, "brier_score", "ter")
"""Metrics that lm-eval registers with `higher_is_better=False`."""
_NAME: Final = "[A-Za-z_][A-Za-z0-9_]*"
ENTRY_POINT: Final = rf"{_NAME}([.]{_NAME})*:{_NAME}"
"""Pattern of a function's name: package.module:function."""
_EXPECTED: Final = f"{', '.join(BUILT_IN)} or a function of your own as package.module:function"

Metric = Annotated[
    BuiltIn | Annotated[str, StringConstraints(pattern=f"^{ENTRY_POINT}$", max_length=_MAX_CHARACTERS)],
    expecting(_EXPECTED),
    with_cel_rules(
        (f"self.matches(r'^({'|'.join(BUILT_IN)}|{ENTRY_POINT})$')", f"expected {_EXPECTED}"),
        max_length=_MAX_CHARACTERS,
    ),
]


def metric_name(metric: str) -> str:
    """The name that a metric's scores are reported under: its own name, or that of the function."""
    return metric.rpartition(":")[2] if is_function(metric) else metric


def is_function(metric: str) -> bool:
    """Whether a metric is a function of the user."""
    return ":" in metric and not is_harness_metric(metric)


def is_harness_metric(metric: str) -> bool:
    """Whether a metric is a score of lm-evaluation-harness: task/metric, or task/metric/filter."""
    return "/" in metric


def is_iob2(labels: Sequence[str]) -> bool:
    """Whether labels of words mark entities in IOB2 format: O, and B-TYPE and I-TYPE for their words."""
    return any(label.startswith("B-") for label in labels) and all(re.fullmatch("O|[BI]-.+", label) for label in labels)


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better: one of an evaluation or of lm-evaluation-harness, no function."""
    if is_harness_metric(metric):
        return metric.split("/")[1] in _LOWER_IS_BETTER_IN_HARNESS
    return metric in _LOWER_IS_BETTER
