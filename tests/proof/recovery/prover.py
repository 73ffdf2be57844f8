"""Runs one recovery schedule, or one negative control of it, and returns its record."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan
from tests.proof.checker import Evidence, findings
from tests.proof.evidence import collect_evidence
from tests.proof.history import steps_lost
from tests.proof.injected.break_worker import BROKEN
from tests.proof.injector import left_behind
from tests.proof.negative_controls import Control, ControlBench, run_control
from tests.proof.nodes import JoinError
from tests.proof.recovery.injector import KillResult, RecoveryInjector
from tests.proof.recovery.local_nodes import holders
from tests.proof.recovery.records import KillRecord, RecoveryControlRecord, RecoveryRecord, RestoreRecord
from tests.proof.recovery.schedules import (
    COMMIT_EVERY,
    EPOCHS,
    Kill,
    Moment,
    RecoverySchedule,
    Target,
    theme_of,
)
from tests.proof.references import ProductReferences, References
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.runs import Runs

_FAILURES = (
    AssertionError,
    GroupFailedError,
    JoinError,
    OSError,
    RuntimeError,
    TimeoutError,
    ValueError,
    subprocess.SubprocessError,
)
"""Errors of a run that does not finish, or of its reference runs."""
_LONGEST = 400
_PLANNED = ("gatheredLayers", "wholeGradients")
"""What a plan for at least two workers chooses at stage 3, and what changes bits."""
_DATA_LOCK = threading.Lock()
"""Schedules run in threads of one process, and the first prepares the data of all."""


@dataclass(frozen=True)
class RecoveryControl:
    """A negative control on the whole product: a defect in how a rank restores, and a loss that exposes it.

    Attributes:
        worker: class of `tests.proof.broken_workers` that replaces the product's worker.
        caught_by: a regular expression that one of the findings has to match.
        target: what is killed once the last commit is copied.
    """

    name: str
    worker: str
    caught_by: str
    target: Target

    @property
    def schedule(self) -> RecoverySchedule:
        """Two nodes and one kill."""
        kill = Kill(self.target, Moment.COPIED, after_step=8, victim=0.0, delay=0.0)
        return RecoverySchedule(0, (1, 1), zero_stage=2, memory_copies=2, resizes=False, rounds=((kill,),))


@dataclass(frozen=True)
class RecoveryProver:
    """Runs schedules and controls.

    Attributes:
        runs: creates job directories.
        commit: the tested commit.
        machine: day and machine.
        gpus: whether each worker has a GPU.
        log: receives progress lines.
    """

    runs: Runs
    commit: str
    machine: str
    gpus: bool = False
    log: Callable[[str], None] = lambda _: None
    _references: dict[tuple[Any, ...], References] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prove(self, schedule: RecoverySchedule) -> RecoveryRecord:
        """Run and check a schedule. Any error is a finding; the directory of a failed run is kept."""
        began = time.monotonic()
        injector = self._injector(f"seed-{schedule.seed}", schedule)
        evidence, found = self._check(injector)
        directory, planned = injector.run.directory, len(schedule.kills)
        if len(injector.results) < planned:
            found = [*found, f"it ended after {len(injector.results)} of {planned} kills"]
        record = RecoveryRecord(
            seed=schedule.seed,
            theme=theme_of(schedule.seed),
            nodes=list(schedule.nodes),
            zero_stage=schedule.zero_stage,
            memory_copies=schedule.memory_copies,
            resizes=schedule.resizes,
            gpus=self.gpus,
            world_sizes=world_sizes(evidence) if evidence else [],
            planned=planned,
            kills=[_kill_record(result) for result in injector.results],
            restores=restores(directory),
            generations=len(evidence.generations) if evidence else 0,
            steps_lost=steps_lost(evidence.generations) if evidence else 0,
            export_sha256=evidence.export_sha256 if evidence else None,
            findings=found,
            seconds=round(time.monotonic() - began, 1),
            commit=self.commit,
            machine=self.machine,
        )
        if not found:
            shutil.rmtree(directory.root)
        return record

    def check_control(self, control: Control, bench: ControlBench) -> RecoveryControlRecord:
        """Run a negative control without Ray."""
        began = time.monotonic()
        found = run_control(control, bench)
        return self._control_record(control.name, control.caught_by, found, began, live=False)

    def check_live_control(self, control: RecoveryControl) -> RecoveryControlRecord:
        """Run a negative control on the whole product."""
        began = time.monotonic()
        injector = self._injector(f"control-{control.worker}", control.schedule, {BROKEN: control.worker})
        _, found = self._check(injector)
        shutil.rmtree(injector.run.directory.root)
        return self._control_record(control.name, control.caught_by, found, began, live=True)

    def _control_record(
        self, name: str, caught_by: str, found: list[str], began: float, *, live: bool
    ) -> RecoveryControlRecord:
        caught = next((finding for finding in found if re.search(caught_by, finding)), None)
        seconds = round(time.monotonic() - began, 1)
        return RecoveryControlRecord(name, live, caught, found, seconds, self.commit, self.machine)

    def references(self, directory: JobDirectory, *, any_size: bool) -> References:
        """The undisturbed runs for a run, which all schedules with the same kind of plan share."""
        saved = files.read_json(directory.plan)
        if saved is None:
            raise ValueError("no plan was made")
        plan = RunPlan.from_json(saved).to_json()
        values = {name: plan[name] for name in _PLANNED}
        with self._lock:
            key = (any_size, *values.values())
            if key not in self._references:
                job = recovery_job(self.runs, 0, 1, any_size=any_size, gpus=self.gpus)
                kind = ProductReferences if self.gpus else References
                self._references[key] = kind(self.runs, job, values)
            return self._references[key]

    def _injector(
        self, name: str, schedule: RecoverySchedule, environment: Mapping[str, str] | None = None
    ) -> RecoveryInjector:
        def job(workers: int) -> FinetuneJob:
            return recovery_job(
                self.runs,
                schedule.zero_stage,
                workers,
                memory_copies=schedule.memory_copies,
                any_size=schedule.resizes,
                gpus=self.gpus,
            )

        return RecoveryInjector(self.runs.empty(name), schedule, job, environment, gpus=self.gpus)

    def _check(self, injector: RecoveryInjector) -> tuple[Evidence | None, list[str]]:
        """Run a schedule; returns the evidence (None if the run failed too early) and the findings."""
        schedule, directory = injector.schedule, injector.run.directory
        try:
            code, output = injector.execute()
            if code != 0:
                self.log(f"seed {schedule.seed} exited with {code}: {output[-2000:]}")
            left = left_behind(directory)
            left += [f"process {holder.pid} still has commits in memory" for holder in holders(directory.root)]
            references = self.references(directory, any_size=schedule.resizes)
            evidence = collect_evidence(directory, references, schedule.zero_stage, code, any_size=schedule.resizes)
        except _FAILURES as error:
            return None, [f"{type(error).__name__}: {error}"[:_LONGEST]]
        finally:
            injector.clean_up()
        return evidence, [*findings(evidence), *left]


def recovery_job(
    runs: Runs, zero_stage: int, workers: int, *, memory_copies: int = 2, any_size: bool = False, gpus: bool = False
) -> FinetuneJob:
    """The job of every schedule: a tiny T5 in fp32 with dropout, whose nodes copy each commit to the next one.

    Args:
        runs: has its data.
        zero_stage: of the job.
        workers: their number.
        memory_copies: commits that each worker keeps in memory.
        any_size: whether fewer workers may train, with the same bits at any number.
        gpus: whether each worker has a GPU.
    """
    execution: dict[str, Any] = {"zeroStage": zero_stage, "microBatchSize": 3}
    if any_size:
        execution |= {"reproducible": "worldSize"}
    elif gpus:
        execution |= {"deterministic": True}
    copies = {"memoryCopies": memory_copies, "peerCopy": True}
    with _DATA_LOCK:
        return runs.job(
            training={"epochs": EPOCHS},
            checkpoint={"every": COMMIT_EVERY, "keepEverySteps": 1, **copies},
            execution=execution,
            workers={"count": workers, "min": 1 if any_size else workers, "gpus": int(gpus), "resizeCooldown": "1s"},
            retry={"backoff": {"initial": "500ms", "max": "1s"}},
        )


def restores(directory: JobDirectory) -> list[RestoreRecord]:
    """Where the worker groups of a run read their state from, the oldest first."""
    found = []
    for number in sorted(int(path.name[4:]) for path in directory.logs.glob("gen-*")):
        events = files.read_lines(directory.generation_logs(number).events)
        found += [
            RestoreRecord(number, event["memoryBytes"], event["peerBytes"], event["volumeBytes"])
            for event in events
            if event["event"] == "restored"
        ]
    return found


def world_sizes(evidence: Evidence) -> list[int]:
    """World sizes of the steps in the order of the generations, without repetitions in a row."""
    sizes = [int(record["worldSize"]) for generation in evidence.generations for record in generation.steps]
    return [size for size, _ in groupby(sizes)]


def _kill_record(result: KillResult) -> KillRecord:
    return KillRecord(result.kill.target, result.kill.moment, result.step, result.hit)
