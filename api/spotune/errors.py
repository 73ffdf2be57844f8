"""The error classes of spotune, with the exit codes that scripts and the supervisor rely on.

::

    SpotuneError                 1   any other error of spotune
    ├── UsageError               2   the command line is wrong; nothing was started
    ├── InfrastructureError     10   machines, network or storage failed; run the same command again
    │   ├── StoppedError        10   the run was stopped on request; run the same command to continue
    │   └── KubernetesError     10   the API server failed or is unreachable
    │       ├── NotFoundError   10   no such object or kind
    │       ├── RefusedError    10   the API server rejected the request or the object
    │       └── TimedOutError   10   what was waited for has not come about in time
    ├── JobError                20   the user's model, data or configuration is wrong; running again does not help
    └── SupersededError         30   a later generation of the same job has taken over; do not restart this one

A message names what failed, the likely cause and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class SpotuneError(Exception):
    """Base class of all errors that users see as a message without a traceback."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """The message. Halves of surrogate pairs, which JSON files may contain, are escaped: UTF-8 has none."""
        return super().__str__().encode("utf-8", "backslashreplace").decode()

    def as_json(self) -> dict[str, Any]:
        """The error for ``--output json``: its class, message and exit code."""
        return {"error": type(self).__name__, "message": str(self), "exitCode": self.exit_code}


class UsageError(SpotuneError):
    """The command line is wrong, for example a missing file or contradictory options."""

    exit_code = 2


class InfrastructureError(SpotuneError):
    """Machines, network or storage failed. Running the same command again continues from the last checkpoint."""

    exit_code = 10


class StoppedError(InfrastructureError):
    """The run was stopped on request; the same command continues from the last commit."""


class KubernetesError(InfrastructureError):
    """The API server failed or is unreachable. The operator retries the reconcile.

    Args:
        message: The API server's message, if it responded.
        status: HTTP status; 0 without a response.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(KubernetesError):
    """The object or its kind does not exist."""


class RefusedError(KubernetesError):
    """The API server rejected the request. The operator shows why in the job's status, and tries again periodically."""


class TimedOutError(KubernetesError):
    """What was waited for has not come about in time."""


@dataclass(frozen=True)
class Problem:
    """One problem in a job file.

    Attributes:
        message: The given value, the allowed values and the nearest valid name, without file and field.
        field: camelCase path as in the YAML, such as ``spec.training.learningRate``; empty for the file itself.
        file: Path as the user gave it; empty for a job that was not read from a file.
        line: Line number, starting at 1; 0 if unknown.
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
    """The user's model, data or configuration is wrong and has to be changed.

    Args:
        message: The complete message; empty: one line per problem.
        problems: All problems of a job file.
    """

    exit_code = 20

    def __init__(self, message: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def as_json(self) -> dict[str, Any]:
        """The error for ``--output json``, with file, line, field and message of each problem."""
        return super().as_json() | {"problems": [problem.as_json() for problem in self.problems]}


class DataError(JobError):
    """A dataset file is missing, inaccessible or corrupt, even after retries."""


class SupersededError(SpotuneError):
    """A later generation of the same job runs. This one must stop and must not be restarted."""

    exit_code = 30
