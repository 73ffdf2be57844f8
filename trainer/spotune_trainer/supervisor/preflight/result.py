"""The results of the preflight: one for each check, and all of them together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: of the check.
        status: `skipped` where a check that this one needs did not pass.
        message: one sentence with figures; after a failure it includes the remedy. While the check runs again, the
            message of its previous run.
        seconds: duration of the check.
    """

    name: str
    status: Literal["running", "passed", "failed", "skipped"]
    message: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class PreflightReport:
    """The results so far. The main thread writes them and the HTTP server's threads read them.

    Attributes:
        checks: results in the order of the checks; empty before the first check. Replaced as a whole.
        passed: whether all checks have passed.
    """

    def __init__(self) -> None:
        self.checks: tuple[CheckResult, ...] = ()
        self.passed = False

    def failures(self) -> str:
        """Messages of the failed checks on one line: root causes only, because dependent checks are skipped."""
        messages = [result.message for result in self.checks if result.status == "failed"]
        return "; ".join(dict.fromkeys(messages))

    def as_json(self) -> dict[str, Any]:
        """The object `supervisor.preflight` of `/progress`."""
        return {"passed": self.passed, "checks": [check.as_json() for check in self.checks]}
