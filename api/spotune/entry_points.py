"""Python functions of the user, named by an entry point such as `package.module:function`.

They are found without running any code: where there is little memory, and where the code must not run.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MAX_SHOWN_CHARACTERS = 200


def find_import_problem(entry_point: str, folder: Path | None = None) -> str | None:
    """Why importing a function would fail, found without running any code; None if no problem was found.

    Modules are located and parsed, but not run. So a name that only exists at run time may be reported as present.

    Args:
        entry_point: `package.module:function`.
        folder: is searched first; None: only where Python finds modules anyway.
    """
    importlib.invalidate_caches()
    module, _, function = entry_point.partition(":")
    first, *inner = module.split(".")
    spec = PathFinder.find_spec(first, [str(folder)]) if folder is not None else None
    spec = spec or _find_top_level(first)
    for name in inner:  # searched by its last name: finding a dotted name would import the parent packages
        path = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, path) if path is not None else None
    if spec is None:
        return f"there is no module {module}"
    try:
        source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
        tree = ast.parse(source) if source is not None else None
    except (ImportError, SyntaxError) as error:
        return f"the module cannot be read ({describe_error(error)})"
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


def describe_error(error: BaseException) -> str:
    """Class and message of an error, in one short line."""
    return shorten(f"{type(error).__name__}: {error}")


def shorten(text: str) -> str:
    """A text in one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]} ..."
