"""One schedule or one control, from its seed or name to its record."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.checker import Evidence, findings, worst_next_loss, worst_of_curve
from tests.proof.evidence import gather
from tests.proof.history import steps_lost
from tests.proof.injected.break_worker import BROKEN
from tests.proof.injector import Performance, Strike
from tests.proof.negative_controls import Bench, Control, run_control, tear
from tests.proof.records import Blow, Controlled, Proven
from tests.proof.references import References
from tests.proof.schedules import COMMIT_EVERY, EPOCHS, Deed, Disturbance, Moment, Schedule
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.runs import Runs


def proof_job(runs: Runs, zero_stage: int, world_size: int, epochs: int = EPOCHS) -> FinetuneJob:
    """The job of every schedule: a tiny T5 in fp32 with dropout, whose checkpoints all stay."""
    return runs.job(
        training={"epochs": epochs},
        checkpoint={"every": COMMIT_EVERY, "keepEverySteps": 1},
        execution={"zeroStage": zero_stage, "microBatchSize": 3},
        workers={"count": world_size, "gpus": 0, "resizeCooldown": "1s"},
        retry={"backoff": {"initial": "500ms", "max": "1s"}},
    )


_FAILURES = (AssertionError, GroupFailedError, OSError, TimeoutError, ValueError, subprocess.SubprocessError)
"""Of a run that does not come to its end, or of what it is compared with."""
_LONGEST = 400


@dataclass(frozen=True)
class LiveControl:
    """A fault in the whole product, played with a kill.

    Attributes:
        worker: class of `tests.proof.broken_workers` in the place of the product's.
        caught_by: a regular expression that one of the findings has to match.
        deed: what is done at a step, so that the fault shows.
        on_restart: what happens to the job directory before a killed command is started again.
    """

    name: str
    worker: str
    caught_by: str
    deed: Deed = Deed.KILL_WORKER
    on_restart: Callable[[JobDirectory], None] = lambda _: None

    @property
    def schedule(self) -> Schedule:
        """Two workers, hit once."""
        blow = Disturbance(self.deed, Moment.STEP, after_step=10, world_size=2, victim=0.0, delay=0.0)
        return Schedule(0, world_size=2, zero_stage=2, disturbances=(blow,))


def tear_newest(directory: JobDirectory) -> None:
    """Damage the newest checkpoint, which has a manifest."""
    newest = [found for found in list_checkpoints(directory.checkpoints) if isinstance(found, Checkpoint)][-1]
    tear(newest.path)


LIVE_CONTROLS = (
    LiveControl("cursor one sample too far", "SampleTooFar", "trained on other samples"),
    LiveControl("first moment of a parameter not restored", "FirstMomentForgotten", "end with other bits"),
    LiveControl("torn checkpoint trusted", "TrustingWorker", "which is corrupt", Deed.KILL_EVERYTHING, tear_newest),
)


@dataclass(frozen=True)
class Prover:
    """Makes records.

    Attributes:
        runs: where runs are made.
        references: of the schedules' job.
        commit: of the code that is tried.
        say: told about progress, a line at a time.
    """

    runs: Runs
    references: References
    commit: str
    say: Callable[[str], None] = lambda _: None

    def schedule(self, schedule: Schedule) -> Proven:
        """Play a schedule and judge it; whatever goes wrong is a finding, and its directory stays."""
        began = time.monotonic()
        performance = self._performance(f"seed-{schedule.seed}", schedule)
        evidence, found = self._judge(performance)
        strikes = performance.strikes
        if len(strikes) < len(schedule.disturbances):
            found = [*found, f"it ended after {len(strikes)} of {len(schedule.disturbances)} disturbances"]
        if not found:
            shutil.rmtree(performance.run.directory.root)
        return Proven(
            seed=schedule.seed,
            zero_stage=schedule.zero_stage,
            world_sizes=[stretch.segment.world_size for stretch in evidence.stretches] if evidence else [],
            wanted=len(schedule.disturbances),
            blows=[_blow(strike) for strike in strikes],
            generations=len(evidence.generations) if evidence else 0,
            steps_lost=steps_lost(evidence.generations) if evidence else 0,
            next_loss=worst_next_loss(evidence) if evidence else None,
            curve=worst_of_curve(evidence) if evidence else None,
            findings=found,
            seconds=round(time.monotonic() - began, 1),
            commit=self.commit,
        )

    def control(self, control: Control, bench: Bench) -> Controlled:
        """Break something without Ray."""
        began = time.monotonic()
        return self._controlled(control.name, control.caught_by, run_control(control, bench), began, live=False)

    def live_control(self, control: LiveControl) -> Controlled:
        """Break something in the whole product."""
        began = time.monotonic()
        performance = self._performance(
            f"control-{control.worker}", control.schedule, {BROKEN: control.worker}, control.on_restart
        )
        _, found = self._judge(performance)
        shutil.rmtree(performance.run.directory.root)
        return self._controlled(control.name, control.caught_by, found, began, live=True)

    def _performance(
        self,
        name: str,
        schedule: Schedule,
        environment: dict[str, str] | None = None,
        on_restart: Callable[[JobDirectory], None] = lambda _: None,
    ) -> Performance:
        def job(world_size: int) -> FinetuneJob:
            return proof_job(self.runs, schedule.zero_stage, world_size)

        return Performance(self.runs.empty(name), schedule, job, environment, on_restart)

    def _judge(self, performance: Performance) -> tuple[Evidence | None, list[str]]:
        """The evidence, if the run came far enough for any, and what is wrong."""
        schedule, directory = performance.schedule, performance.run.directory
        try:
            code, output = performance.play()
            if code != 0:
                self.say(f"seed {schedule.seed} ended with {code}: {output[-2000:]}")
            evidence = gather(directory, self.references, schedule.zero_stage, code)
        except _FAILURES as error:
            return None, [f"{type(error).__name__}: {error}"[:_LONGEST]]
        finally:
            performance.end()
        return evidence, findings(evidence)

    def _controlled(self, name: str, caught_by: str, found: list[str], began: float, *, live: bool) -> Controlled:
        caught = next((finding for finding in found if re.search(caught_by, finding)), None)
        return Controlled(name, live, caught, found, round(time.monotonic() - began, 1), self.commit)


def _blow(strike: Strike) -> Blow:
    done = strike.disturbance
    return Blow(done.deed, done.moment, strike.step, strike.hit, done.world_size)
