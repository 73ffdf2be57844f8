"""Functions of the user's as metrics: looked for without being run, imported, and called.

The supervisor, which looks before any GPU is paid for, only finds them: it has little memory, and no business to run
what an image holds. The driver imports them before it waits for workers, and each worker before it trains.
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
    "correct the name, or put the module where the trainer imports from: into the image (cluster.image); on one "
    "machine beside spotune, or into a folder of PYTHONPATH"
)
_SHOWN_CHARACTERS = 200

Metric = Callable[[str, str, Mapping[str, Any]], float | None]


def missing_functions(evaluation: EvaluationSpec) -> list[str]:
    """A sentence for every function that Python would not find here, as far as can be told without running anything."""
    importlib.invalidate_caches()
    functions = filter(is_function, evaluation.metrics)
    reasons = {entry_point: _why_missing(entry_point) for entry_point in functions}
    return [f"{entry_point}: {reason}; {_REMEDY}" for entry_point, reason in reasons.items() if reason]


def own_metric(entry_point: str) -> Metric:
    """The function at `package.module:function`, as a metric that gives True, False, a finite float, or None.

    Raises:
        JobError: it cannot be imported, or takes other arguments than (answer, reference, columns). The metric raises
            one where the function raises, or gives something else.
    """
    function = _import(entry_point)

    def judge(prediction: str, reference: str, columns: Mapping[str, Any]) -> float | None:
        where = f"for the answer {_shown(prediction)!r} to {_shown(reference)!r}"
        try:
            value = function(prediction, reference, MappingProxyType(columns))
        except Exception as error:
            raise JobError(
                f"{FIELD}: {entry_point} raised {_said(error)} {where}. Mend it, or have it return None for rows that "
                "do not count."
            ) from error
        score = _finite(value)
        if score is None and value is not None:
            raise JobError(
                f"{FIELD}: {entry_point} returned {_shown(repr(value))} {where}. Have it return a finite number, True, "
                "False, or None for rows that do not count."
            )
        return score

    return judge


def _finite(value: Any) -> float | None:
    """A bool, or a number as a float, of NumPy and PyTorch too; None for what is neither, or not finite."""
    with suppress(OverflowError, RuntimeError, ValueError):  # the last two: an array has more than one item
        found = value.item() if hasattr(value, "item") else value
        if isinstance(found, bool):
            return found
        if isinstance(found, Real) and math.isfinite(found):
            return float(found)
    return None


def _import(entry_point: str) -> Callable[..., object]:
    module, _, name = entry_point.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module does while it is imported
        raise JobError(f"{FIELD}: {entry_point} cannot be imported ({_said(error)}): {_REMEDY}") from error
    if not callable(function):
        raise JobError(f"{FIELD}: {entry_point} is no function but {_shown(repr(function))}: name a function")
    with suppress(ValueError):  # what is written in C may not say what it takes
        try:
            inspect.signature(function).bind("", "", {})
        except TypeError as error:
            raise JobError(
                f"{FIELD}: {entry_point} cannot be called with (answer, reference, columns): {error}"
            ) from error
    found: Callable[..., object] = function
    return found


def _why_missing(entry_point: str) -> str | None:
    module, _, function = entry_point.partition(":")
    first, *inner = module.split(".")
    spec = _find(first)
    for name in inner:  # by its last name: with its whole one, packages around it would have to be imported
        path = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, path) if path is not None else None
    if spec is None:
        return f"there is no module {module}"
    try:
        source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
        tree = ast.parse(source) if source is not None else None
    except (ImportError, SyntaxError) as error:
        return f"the module cannot be read ({_said(error)})"
    return f"the module has no {function}" if tree is not None and not _may_have(tree, function) else None


def _find(module: str) -> ModuleSpec | None:
    """Where a module that is in no package is, by the finders that `import` asks."""
    found = (finder.find_spec(module, None) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _may_have(tree: ast.Module, name: str) -> bool:
    """Whether a module may have a name: it binds that somewhere, or imports or makes names that cannot be seen."""
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


def _said(error: BaseException) -> str:
    return _shown(f"{type(error).__name__}: {error}")


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} ..."
