"""Metrics that are Python functions of the user, named by an entry point such as `package.module:function`.

The functions are checked in two stages. The supervisor's preflight only locates them, without importing: it has little
memory, and must not run code from the image. The driver imports them before it waits for workers, and so does each
worker before it trains.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from types import MappingProxyType
from typing import Any

from spotune.entry_points import describe_error, find_import_problem, shorten
from spotune.errors import JobError
from spotune.job import EvaluationSpec
from spotune.job.training.metric import is_function
from spotune_trainer.entry_points import import_function

FIELD = "training.evaluation.metrics"
_REMEDY = (
    "correct the name, or install the module where the trainer can import it: in the image (cluster.image), or on a "
    "single machine beside spotune or in a folder of PYTHONPATH"
)

Metric = Callable[[str, str, Mapping[str, Any]], float | None]


def missing_functions(evaluation: EvaluationSpec) -> list[str]:
    """An error message for every metric function that Python cannot find here.

    Modules are located and parsed, but not run. So a name that only exists at run time may be reported as present.
    """
    functions = filter(is_function, evaluation.metrics)
    problems = {entry_point: find_import_problem(entry_point) for entry_point in functions}
    return [f"{entry_point}: {problem}; {_REMEDY}" for entry_point, problem in problems.items() if problem]


def load_custom_metric(entry_point: str) -> Metric:
    """Import the function at `package.module:function` as a metric.

    Returns:
        A metric that returns True, False, a finite float, or None for rows that do not count. It raises JobError if the
        function raises, or returns anything else.

    Raises:
        JobError: the function cannot be imported, or does not take (answer, reference, columns).
    """
    function = _import(entry_point)

    def metric(prediction: str, reference: str, columns: Mapping[str, Any]) -> float | None:
        where = f"for the answer {shorten(prediction)!r} to {shorten(reference)!r}"
        try:
            value = function(prediction, reference, MappingProxyType(columns))
        except Exception as error:
            raise JobError(
                f"{FIELD}: {entry_point} raised {describe_error(error)} {where}. Correct the function, or "
                "return None for rows that do not count."
            ) from error
        score = _finite(value)
        if score is None and value is not None:
            raise JobError(
                f"{FIELD}: {entry_point} returned {shorten(repr(value))} {where}. Return a finite number, "
                "True, False, or None for rows that do not count."
            )
        return score

    return metric


def _finite(value: Any) -> float | None:
    """A bool, or a finite number as a float, also from NumPy and PyTorch scalars; None for anything else."""
    with suppress(OverflowError, RuntimeError, ValueError):  # item() raises the last two on arrays with several items
        scalar = value.item() if hasattr(value, "item") else value
        if isinstance(scalar, bool):
            return scalar
        if isinstance(scalar, Real) and math.isfinite(scalar):
            return float(scalar)
    return None


def _import(entry_point: str) -> Callable[..., object]:
    try:
        function = import_function(entry_point)
    except ImportError as error:
        raise JobError(f"{FIELD}: {error}: {_REMEDY}") from error
    with suppress(ValueError):  # functions written in C may have no signature
        try:
            inspect.signature(function).bind("", "", {})
        except TypeError as error:
            raise JobError(
                f"{FIELD}: {entry_point} cannot be called with (answer, reference, columns): {error}"
            ) from error
    return function
