"""Find a job's training function without running it, and import it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotune.entry_points import find_import_problem
from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.entry_points import import_function

FIELD = "training.function"
_REMEDY = (
    "correct the name, set training.code to the folder of the module, or install the module where the trainer can "
    "import it: in the image (cluster.image), or on a single machine beside spotune"
)


def missing_function(job: FinetuneJob) -> str | None:
    """Why the job's training function cannot be imported here, found without running any code; None if it may be.

    Modules are located and parsed. So a name that only exists at run time may be reported as present.
    """
    training = job.spec.training
    if not training.function:
        return None
    problem = find_import_problem(training.function, Path(training.code) if training.code else None)
    return f"{training.function}: {problem}; {_REMEDY}" if problem else None


def load_function(entry_point: str, code: str) -> Callable[..., Any]:
    """Import a training function, from the folder `code` if that is not empty.

    Raises:
        JobError: it cannot be imported.
    """
    if code:
        if not Path(code).is_dir():
            raise JobError(f"training.code: there is no folder {code}")
        sys.path.insert(0, code)
    try:
        return import_function(entry_point)
    except ImportError as error:
        raise JobError(f"{FIELD}: {error}; {_REMEDY}") from error
