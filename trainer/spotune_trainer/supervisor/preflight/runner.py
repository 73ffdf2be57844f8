"""Runs the preflight checks of a job, and records on the volume that they passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from spotune.errors import SpotuneError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.job import has_commits
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.checks import Check, checks_of
from spotune_trainer.supervisor.preflight.result import CheckResult, PreflightReport


class Preflight:
    """Runs the checks of a job and keeps a report of them.

    Args:
        directory: of the job.
        report: updated with each result at once.
        clock: seconds, monotonic.
        checks: returns the checks of a job by name, each after the checks that it needs.
    """

    def __init__(
        self,
        directory: JobDirectory,
        report: PreflightReport,
        clock: Callable[[], float] = time.monotonic,
        checks: Callable[[FinetuneJob, JobDirectory], Mapping[str, Check]] = checks_of,
    ) -> None:
        self._directory = directory
        self._report = report
        self._clock = clock
        self._checks = checks

    def passes(self, job: FinetuneJob) -> bool:
        """Run all checks, even after a failure. Once there are checkpoints, checks that passed are not repeated."""
        checks = self._checks(job, self._directory)
        earlier = self._passed_earlier()
        if checks.keys() <= earlier.keys():
            self._report.checks = tuple(earlier[name] for name in checks)
        else:
            self._report.checks = tuple(result for result in self._report.checks if result.name in checks)
            for name, check in checks.items():
                self._run(name, check)
        self._report.passed = all(result.status == "passed" for result in self._report.checks)
        return self._report.passed

    def failures(self) -> str:
        """Messages of the failed checks on one line; empty where none has failed."""
        return self._report.failures()

    def record(self) -> None:
        """Record on the volume that all checks passed, for later supervisors of this job."""
        results = [result.as_json() for result in self._report.checks]
        files.write_json(self._directory.preflight, {"time": time.time(), "checks": results})

    def _run(self, name: str, check: Check) -> None:
        results = {result.name: result for result in self._report.checks}
        if (failed := self._unmet_need(check, results)) is not None:
            self._show({**results, name: CheckResult(name, "skipped", f"waits for the check {failed}")})
            return
        before = results.get(name, CheckResult(name, "running"))
        message = "" if before.status == "skipped" else before.message
        self._show({**results, name: replace(before, status="running", message=message)})
        started = self._clock()
        try:
            result = CheckResult(name, "passed", check.run())
        except (SpotuneError, OSError) as error:
            result = CheckResult(name, "failed", str(error))
        self._show({**results, name: replace(result, seconds=round(self._clock() - started, 3))})

    def _unmet_need(self, check: Check, results: Mapping[str, CheckResult]) -> str | None:
        """The name of the first check that `check` needs and that did not pass."""
        return next((name for name in check.needs if results[name].status != "passed"), None)

    def _show(self, results: Mapping[str, CheckResult]) -> None:
        self._report.checks = tuple(results.values())

    def _passed_earlier(self) -> Mapping[str, CheckResult]:
        """Recorded results by name; empty before the first commit, because until then every start repeats them."""
        if not has_commits(self._directory):
            return {}
        content = files.read_json(self._directory.preflight) or {"checks": []}
        return {result["name"]: CheckResult(**result) for result in content["checks"]}
