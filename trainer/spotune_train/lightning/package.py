"""The package of Lightning that the training function uses. They do not mix: each checks for its own classes."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType


def lightning_package() -> ModuleType:
    """`lightning.pytorch`, or `pytorch_lightning` if only that has been imported or is installed.

    Raises:
        ImportError: neither is installed.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ImportError(
        "spotune_train.lightning needs Lightning, which is not installed beside the trainer: install the package "
        "lightning (pip install lightning), in a cluster in the image of the job (cluster.image)"
    )
