"""What a benchmark's output says of the machine that it ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from tests.provenance import commit


def describe_machine(*packages: str) -> dict[str, object]:
    """The measured commit, cores, processor, and the versions of Python and of some packages."""
    return {
        "commit": commit(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
