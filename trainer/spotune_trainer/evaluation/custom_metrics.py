"""Metrics that are Python functions of the user, named by an entry point such as `package.module:function`.

The functions are checked in two stages. The supervisor's preflight only locates them, without importing: it has little
memory, and must not run code from the image. The driver imports them before it waits for workers, and so does each
worker before it trains.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from numbers import Real
from types import MappingProxyType
from typing import Any

from spotune.errors import JobError
from spotune.job import EvaluationSpec
from spotune.job.metric import is_function

FIELD = "training.evaluation.metrics"
_REMEDY = (
    "correct the name, or install the module where the trainer can import it: in the image (cluster.image), or on a "
    "single machine beside spotune or in a folder of PYTHONPATH"
)
_MAX_SHOWN_CHARACTERS = 200

Metric = Callable[[str, str, Mapping[str, Any]], float | None]


def missing_functions(evaluation: EvaluationSpec) -> list[str]:
    """An error message for every metric function that Python cannot find here.

    Modules are located and parsed, but not run. So a name that only exists at run time may be reported as present.
    """
    importlib.invalidate_caches()
    functions = filter(is_function, evaluation.metrics)
    problems = {entry_point: _find_import_problem(entry_point) for entry_point in functions}
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
        where = f"for the answer {_shorten(prediction)!r} to {_shorten(reference)!r}"
        try:
            value = function(prediction, reference, MappingProxyType(columns))
        except Exception as error:
            raise JobError(
                f"{FIELD}: {entry_point} raised {_describe_error(error)} {where}. Correct the function, or "
                "return None for rows that do not count."
            ) from error
        score = _finite(value)
        if score is None and value is not None:
            raise JobError(
                f"{FIELD}: {entry_point} returned {_shorten(repr(value))} {where}. Return a finite number, "
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
    module, _, name = entry_point.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing runs arbitrary code
        raise JobError(f"{FIELD}: {entry_point} cannot be imported ({_describe_error(error)}): {_REMEDY}") from error
    if not callable(function):
        raise JobError(f"{FIELD}: {entry_point} is not a function but {_shorten(repr(function))}: name a function")
    with suppress(ValueError):  # functions written in C may have no signature
        try:
            inspect.signature(function).bind("", "", {})
        except TypeError as error:
            raise JobError(
                f"{FIELD}: {entry_point} cannot be called with (answer, reference, columns): {error}"
            ) from error
    checked: Callable[..., object] = function
    return checked


def _find_import_problem(entry_point: str) -> str | None:
    """Why importing the function would fail, found without running any code; None if no problem was found."""
    module, _, function = entry_point.partition(":")
    first, *inner = module.split(".")
    spec = _find_top_level(first)
    for name in inner:  # searched by its last name: finding a dotted name would import the parent packages
        path = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, path) if path is not None else None
    if spec is None:
        return f"there is no module {module}"
    try:
        source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
        tree = ast.parse(source) if source is not None else None
    except (ImportError, SyntaxError) as error:
        return f"the module cannot be read ({_describe_error(error)})"
    return f"the module has no {function}" if tree is not None and not _may_have(tree, function) else None


def _find_top_level(module: str) -> ModuleSpec | None:
    """The location of a top-level module, by the finders that `import` uses."""
    specs = (finder.find_spec(module, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _may_have(tree: ast.Module, name: str) -> bool:
    """Whether a module may define a name: it binds it anywhere, has a star import, or defines `__getattr__`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                names = {bound}
            case ast.Name(id=bound, ctx=ast.Store()):
                names = {bound}
            case ast.alias(name=imported, asname=given):
                names = {given or imported.partition(".")[0]}
            case _:
                continue
        if names & {name, "*", "__getattr__"}:
            return True
    return False


def _describe_error(error: BaseException) -> str:
    return _shorten(f"{type(error).__name__}: {error}")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]} ..."
