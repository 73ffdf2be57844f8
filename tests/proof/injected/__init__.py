"""What every Python process of a run that is being proven loads before anything else."""

from __future__ import annotations

import os
from pathlib import Path

from tests import ROOT


def injected_path() -> str:
    """The PYTHONPATH of such a process: this folder, whose `sitecustomize` Python runs, before all others."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH"))))
