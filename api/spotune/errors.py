"""The errors of spotune, one tree, each with the exit code that scripts and the supervisor act on.

::

    SpotuneError                 1   what spotune itself refuses or cannot do
    ├── UsageError               2   the command line is wrong: nothing was started
    ├── InfrastructureError     10   machines, network or storage failed: run the same command again
    ├── JobError                20   the user's model, data or configuration is wrong: running again does not help
    └── SupersededError         30   a later generation of the same job has taken over: leave it alone

A message says what happened to what, why it is likely, and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class SpotuneError(Exception):
    """Base of all errors that are shown to people as a sentence, without a traceback."""

    exit_code: ClassVar[int] = 1

    def as_json(self) -> dict[str, Any]:
        """What ``--output json`` prints on standard error: the error's kind, text and exit code."""
        return {"error": type(self).__name__, "message": str(self), "exitCode": self.exit_code}


class UsageError(SpotuneError):
    """The command line is wrong: a file that does not exist, options that contradict one another."""

    exit_code = 2


class InfrastructureError(SpotuneError):
    """Machines, network or storage failed; the same command run again goes on from the last commit."""

    exit_code = 10


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a job file.

    Attributes:
        message: What was given, what is allowed and the nearest valid name, without file and field.
        field: camelCase path as written in the YAML, e.g. ``spec.training.learningRate``; empty for the file itself.
        file: The file as the user named it; empty for a job that did not come from a file.
        line: Line in the file, from 1; 0 if it is not known.
    """

    message: str
    field: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file and self.line else self.file
        return ": ".join(part for part in (place, self.field, self.message) if part)

    def as_json(self) -> dict[str, Any]:
        """The problem with camelCase keys for ``--output json``."""
        return {"file": self.file, "line": self.line, "field": self.field, "message": self.message}


class JobError(SpotuneError):
    """The user's model, data or configuration is wrong; nothing but a change of it helps.

    Args:
        message: The whole text, or empty to have it written from ``problems``, one line each.
        problems: Every single thing that is wrong, for a job file.
    """

    exit_code = 20

    def __init__(self, message: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def as_json(self) -> dict[str, Any]:
        """Adds ``problems``: file, line, field and message of each."""
        return super().as_json() | {"problems": [problem.as_json() for problem in self.problems]}


class DataError(JobError):
    """A file of a dataset is missing, forbidden or damaged, also after it was asked for again."""


class SupersededError(SpotuneError):
    """A later generation of the same job runs: this one must stop and must not be started again."""

    exit_code = 30
