"""Preflight: whether a job can be run, found out on the head before any GPU is paid for.

Each check is a function that returns a sentence with figures, or raises with one that also says what to do. Whatever
fails may be mended by time, a larger volume or an upload, so it is looked at again and again; what once passed is not
looked at any more when there are checkpoints, for a container that starts again is to train. Without torch: there is
little memory beside the head.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from spotune.errors import InfrastructureError, SpotuneError, UsageError
from spotune.job import FinetuneJob
from spotune.job.metric import is_function
from spotune_trainer import files
from spotune_trainer.job_directory.job import has_commits
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.control import CheckResult, Standing
from spotune_trainer.supervisor.preflight.sources import (
    ModelFacts,
    check_data,
    check_metrics,
    count_parameters,
    read_model,
)
from spotune_trainer.supervisor.preflight.storage import (
    StorageError,
    StorageNeed,
    check_commit_time,
    check_semantics,
    check_space,
    storage_need,
)

NOTICE_SECONDS = "SPOTUNE_NOTICE_SECONDS"
"""Variable with the time between a spot notice and the end of a worker, in seconds."""

Check = Callable[[], str]


def checks_of(job: FinetuneJob, directory: JobDirectory) -> dict[str, Check]:
    """The checks of a job by name, in the order in which they are to run."""
    found: list[ModelFacts] = []

    def model() -> str:
        found.append(read_model(job))
        return found[0].sentence

    def need() -> StorageNeed:
        if not found:
            raise InfrastructureError("the size of a checkpoint is not known before the model can be read")
        return storage_need(job, found[0].parameters, directory)

    has_functions = any(map(is_function, job.spec.training.evaluation.metrics))
    metrics: dict[str, Check] = {"metrics": lambda: check_metrics(job)} if has_functions else {}
    notice = os.environ.get(NOTICE_SECONDS)
    return {
        "storage-semantics": lambda: check_semantics(directory.root),
        "model": model,
        "data": lambda: check_data(job, directory),
        **metrics,
        "storage-space": lambda: check_space(need(), directory.root),
        "commit-time": lambda: check_commit_time(need(), directory.root, float(notice) if notice else None),
    }


def refuse_missing_space(directory: JobDirectory, job: FinetuneJob) -> None:
    """Refuse a job that is new on this machine and whose checkpoints do not fit on the disk; raises UsageError.

    Nobody is there to make the disk larger while it trains, and commits that fail would be lost work by the first kill.
    A model whose configuration cannot be read is left to the workers, who try again and say why.
    """
    try:
        parameters = count_parameters(job)
    except (SpotuneError, OSError):
        return
    need = storage_need(job, parameters, directory)
    try:
        check_space(need, directory.root, "Make room, give a --directory on a larger disk, or lower checkpoint.keep")
    except StorageError as error:
        raise UsageError(f"{directory.root}: {error}") from error


class Preflight:
    """Runs the checks of a job, and keeps what they found.

    Args:
        directory: of the job.
        standing: shown each result as it comes.
        clock: seconds, monotonic.
        checks: gives the checks of a job, by name.
    """

    def __init__(
        self,
        directory: JobDirectory,
        standing: Standing,
        clock: Callable[[], float] = time.monotonic,
        checks: Callable[[FinetuneJob, JobDirectory], Mapping[str, Check]] = checks_of,
    ) -> None:
        self._directory = directory
        self._standing = standing
        self._clock = clock
        self._checks = checks

    def passes(self, job: FinetuneJob) -> bool:
        """Run the checks, each of them whatever became of the others, unless they passed in an earlier life."""
        checks = self._checks(job, self._directory)
        earlier = self._passed_earlier()
        if checks.keys() <= earlier.keys():
            self._standing.checks = tuple(earlier[name] for name in checks)
        else:
            for name, check in checks.items():
                self._run(name, check)
        self._standing.passed = all(result.status == "passed" for result in self._standing.checks)
        return self._standing.passed

    def failures(self) -> str:
        """What the failed checks said, on one line."""
        messages = [result.message for result in self._standing.checks if result.status == "failed"]
        return "; ".join(dict.fromkeys(messages))

    def record(self) -> None:
        """Remember on the volume that everything passed."""
        results = [result.as_json() for result in self._standing.checks]
        files.write_json(self._directory.preflight, {"time": time.time(), "checks": results})

    def _run(self, name: str, check: Check) -> None:
        results = {result.name: result for result in self._standing.checks}
        before = results.get(name, CheckResult(name, "running"))
        self._show({**results, name: replace(before, status="running")})
        started = self._clock()
        try:
            result = CheckResult(name, "passed", check())
        except (SpotuneError, OSError) as error:
            result = CheckResult(name, "failed", str(error))
        self._show({**results, name: replace(result, seconds=round(self._clock() - started, 3))})

    def _show(self, results: Mapping[str, CheckResult]) -> None:
        self._standing.checks = tuple(results.values())

    def _passed_earlier(self) -> Mapping[str, CheckResult]:
        """Results by name that were recorded; nothing before the first commit, when every start looks again."""
        if not has_commits(self._directory):
            return {}
        content = files.read_json(self._directory.preflight) or {"checks": []}
        return {result["name"]: CheckResult(**result) for result in content["checks"]}
