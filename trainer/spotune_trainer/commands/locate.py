"""Find the code of the user, a function or a command, without running it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spotune.errors import Problem
from spotune.job import FinetuneJob
from spotune_trainer.commands.environment import FIELD, search_path
from spotune_trainer.training_functions.locate import FIELD as FUNCTION_FIELD
from spotune_trainer.training_functions.locate import missing_function

_REMEDY = "correct the name, or set training.code to the folder that it is in"


def missing_user_code(job: FinetuneJob) -> Problem | None:
    """Why the job's function cannot be imported here, or its command not started; None if nothing was found."""
    for field, reason in ((FUNCTION_FIELD, missing_function(job)), (FIELD, missing_program(job))):
        if reason:
            return Problem(reason, f"spec.{field}")
    return None


def missing_program(job: FinetuneJob) -> str | None:
    """Why the job's command cannot start here; None if nothing was found.

    The first argument that ends in .py is taken for a script, which has to exist, too.
    """
    training = job.spec.training
    if not training.command:
        return None
    folder = Path(training.code) if training.code else Path.cwd()
    if not folder.is_dir():
        return f"there is no folder {folder}: correct training.code"
    program, *arguments = training.command
    is_path = os.sep in program
    found = (folder / program).exists() if is_path else shutil.which(program, path=search_path(os.environ))
    if not found:
        where = f"in {folder}" if is_path else "on the path"
        return f"there is no program {program} {where}: {_REMEDY}, or install it in the image (cluster.image)"
    script = next((each for each in arguments if each.endswith(".py") and len(each.split()) == 1), None)
    if script is not None and not script.startswith("-") and not (folder / script).exists():
        return f"there is no script {script} in {folder}: {_REMEDY}"
    return None
