"""Import Python functions of the user, named by an entry point such as `package.module:function`.

The supervisor's preflight only locates them (`spotune.entry_points`): it has little memory, and must not run code from
the image.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from spotune.entry_points import describe_error, shorten


def import_function(entry_point: str) -> Callable[..., object]:
    """Import the function at `package.module:function`.

    Raises:
        ImportError: the module cannot be imported, whatever it raises, or the name is missing or no function.
    """
    module, _, name = entry_point.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing runs arbitrary code
        raise ImportError(f"{entry_point} cannot be imported ({describe_error(error)})") from error
    if not callable(function):
        raise ImportError(f"{entry_point} is not a function but {shorten(repr(function))}: name a function")
    imported: Callable[..., object] = function
    return imported
