"""Runs one schedule or one negative control and returns its record."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.checker import Evidence, findings, max_curve_difference, max_next_loss_difference
from tests.proof.evidence import collect_evidence
from tests.proof.history import steps_lost
from tests.proof.injected.break_worker import BROKEN
from tests.proof.injector import FaultInjector, Injection, left_behind
from tests.proof.mixtures import mixture_job
from tests.proof.negative_controls import Control, ControlBench, run_control, tear
from tests.proof.nodes import JoinError
from tests.proof.records import ControlRecord, FaultRecord, ScheduleRecord
from tests.proof.references import References
from tests.proof.schedules import COMMIT_EVERY, EPOCHS, Data, Fault, FaultKind, InjectionPoint, Schedule
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.labelled import labelled_job
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import BATCH, STEPS_PER_EPOCH, Runs

_DATA_LOCK = threading.Lock()
"""Schedules run in threads of one process, and the first of a kind prepares the data of all."""


def proof_job(
    runs: Runs, zero_stage: int, world_size: int, epochs: int = EPOCHS, *, data: Data = Data.ROWS
) -> FinetuneJob:
    """The job of every schedule: a tiny T5 in fp32 with dropout, whose checkpoints all stay.

    On pairs it trains a tiny Llama, and on labels a tiny BERT with a new head and dropout.

    Args:
        runs: has its data.
        zero_stage: of the job.
        world_size: number of workers.
        epochs: how long it trains, in epochs of `STEPS_PER_EPOCH` steps.
        data: what it trains on.
    """
    sections: dict[str, Any] = {
        "checkpoint": {"every": COMMIT_EVERY, "keepEverySteps": 1},
        "execution": {"zeroStage": zero_stage, "microBatchSize": 3},
        "workers": {"count": world_size, "gpus": 0, "resizeCooldown": "1s"},
        "retry": {"backoff": {"initial": "500ms", "max": "1s"}},
    }
    with _DATA_LOCK:
        if data is Data.LABELS:
            training = {"epochs": epochs, "globalBatchSize": BATCH, "learningRate": 1e-3}
            rows = STEPS_PER_EPOCH * BATCH
            return labelled_job(runs.root / "labels", rows=rows, dropout=0.1, training=training, **sections)
        if data is Data.PAIRS:
            training = {"epochs": epochs, "globalBatchSize": BATCH}
            root = runs.root / "pairs"
            root.mkdir(exist_ok=True)
            return preference_job(root, "dpo", pairs=STEPS_PER_EPOCH * BATCH, training=training, **sections)
        if data is Data.MIXTURE:
            return mixture_job(runs, epochs * STEPS_PER_EPOCH, **sections)
        return runs.job(training={"epochs": epochs}, **sections)


_FAILURES = (AssertionError, GroupFailedError, JoinError, OSError, TimeoutError, ValueError, subprocess.SubprocessError)
"""Errors of a run that does not finish, or of its reference runs."""
_LONGEST = 400


@dataclass(frozen=True)
class LiveControl:
    """A negative control on the whole product, with a kill.

    Attributes:
        worker: class of `tests.proof.broken_workers` that replaces the product's worker.
        caught_by: a regular expression that one of the findings has to match.
        kind: fault that is injected at a step and exposes the defect.
        on_restart: called with the job directory before a killed command is started again.
    """

    name: str
    worker: str
    caught_by: str
    kind: FaultKind = FaultKind.KILL_WORKER
    on_restart: Callable[[JobDirectory], None] = lambda _: None

    @property
    def schedule(self) -> Schedule:
        """Two workers and one fault."""
        fault = Fault(self.kind, InjectionPoint.STEP, after_step=10, world_size=2, victim=0.0, delay=0.0)
        return Schedule(0, world_size=2, zero_stage=2, faults=(fault,))


def tear_newest(directory: JobDirectory) -> None:
    """Corrupt the newest committed checkpoint."""
    newest = [found for found in list_checkpoints(directory.checkpoints) if isinstance(found, Checkpoint)][-1]
    tear(newest.path)


LIVE_CONTROLS = (
    LiveControl("cursor one sample too far", "SampleTooFar", "trained on different samples"),
    LiveControl("first moment of a parameter not restored", "FirstMomentForgotten", "end with different bits"),
    LiveControl(
        "torn checkpoint trusted", "TrustingWorker", "which is corrupt", FaultKind.KILL_EVERYTHING, tear_newest
    ),
)


@dataclass(frozen=True)
class Prover:
    """Runs schedules and controls, and returns their records.

    Attributes:
        runs: creates job directories.
        references: reference runs of the schedules' jobs.
        commit: the tested commit.
        log: receives progress lines.
    """

    runs: Runs
    references: Mapping[Data, References]
    commit: str
    log: Callable[[str], None] = lambda _: None

    def prove_schedule(self, schedule: Schedule) -> ScheduleRecord:
        """Run and check a schedule. Any error is a finding; the directory of a failed run is kept."""
        began = time.monotonic()
        injector = self._injector(f"seed-{schedule.seed}", schedule)
        evidence, found = self._check(injector)
        injections = injector.injections
        if len(injections) < len(schedule.faults):
            found = [*found, f"it ended after {len(injections)} of {len(schedule.faults)} faults"]
        if not found:
            shutil.rmtree(injector.run.directory.root)
        return ScheduleRecord(
            seed=schedule.seed,
            zero_stage=schedule.zero_stage,
            world_sizes=[each.segment.world_size for each in evidence.compared] if evidence else [],
            wanted=len(schedule.faults),
            blows=[_fault_record(injection) for injection in injections],
            generations=len(evidence.generations) if evidence else 0,
            steps_lost=steps_lost(evidence.generations) if evidence else 0,
            next_loss=max_next_loss_difference(evidence) if evidence else None,
            curve=max_curve_difference(evidence) if evidence else None,
            findings=found,
            seconds=round(time.monotonic() - began, 1),
            commit=self.commit,
        )

    def check_control(self, control: Control, bench: ControlBench) -> ControlRecord:
        """Run a negative control without Ray."""
        began = time.monotonic()
        return self._control_record(control.name, control.caught_by, run_control(control, bench), began, live=False)

    def check_live_control(self, control: LiveControl) -> ControlRecord:
        """Run a negative control on the whole product."""
        began = time.monotonic()
        injector = self._injector(
            f"control-{control.worker}", control.schedule, {BROKEN: control.worker}, control.on_restart
        )
        _, found = self._check(injector)
        shutil.rmtree(injector.run.directory.root)
        return self._control_record(control.name, control.caught_by, found, began, live=True)

    def _injector(
        self,
        name: str,
        schedule: Schedule,
        environment: dict[str, str] | None = None,
        on_restart: Callable[[JobDirectory], None] = lambda _: None,
    ) -> FaultInjector:
        def job(world_size: int) -> FinetuneJob:
            return proof_job(self.runs, schedule.zero_stage, world_size, data=schedule.data)

        return FaultInjector(self.runs.empty(name), schedule, job, environment, on_restart)

    def _check(self, injector: FaultInjector) -> tuple[Evidence | None, list[str]]:
        """Run a schedule; returns the evidence (None if the run failed too early) and the findings."""
        schedule, directory = injector.schedule, injector.run.directory
        try:
            code, output = injector.execute()
            if code != 0:
                self.log(f"seed {schedule.seed} exited with {code}: {output[-2000:]}")
            references = self.references[schedule.data]
            left = left_behind(directory)
            evidence = collect_evidence(directory, references, schedule.zero_stage, code)
        except _FAILURES as error:
            return None, [f"{type(error).__name__}: {error}"[:_LONGEST]]
        finally:
            injector.clean_up()
        return evidence, [*findings(evidence), *left]

    def _control_record(
        self, name: str, caught_by: str, found: list[str], began: float, *, live: bool
    ) -> ControlRecord:
        caught = next((finding for finding in found if re.search(caught_by, finding)), None)
        return ControlRecord(name, live, caught, found, round(time.monotonic() - began, 1), self.commit)


def _fault_record(injection: Injection) -> FaultRecord:
    done = injection.fault
    return FaultRecord(done.kind, done.point, injection.step, injection.hit, done.world_size)
