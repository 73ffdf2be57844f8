"""The driver of one attempt: plan, worker group, why it ended, next worker group.

What it knows lies on the volume, so that a new driver goes on where a lost one was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spotune.errors import InfrastructureError, JobError, SpotuneError, SupersededError
from spotune.fingerprint import changed_fields
from spotune.job import FinetuneJob
from spotune.plan.checkpoint_interval import seconds_to_preemption
from spotune.retry import FailureCause, GiveUp, decide
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim, is_superseded, list_generations, steps_done
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.driver.node_watch import NodeWatch
from spotune_trainer.driver.planning import plan_run, save_plan
from spotune_trainer.driver.scaling import choose_world_size
from spotune_trainer.driver.status_publisher import Monitor
from spotune_trainer.evaluation.metrics import build_metrics
from spotune_trainer.export.hub import publish, uploading
from spotune_trainer.job_directory.job import job_of, training_length
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.observability.goodput_ledger import GoodputAccount, record_end, record_lost_ends, seconds_lost
from spotune_trainer.observability.progress import Phase
from spotune_trainer.observability.tracking.services import trackers_of
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.result import (
    CorruptCheckpoint,
    Failed,
    GroupAgents,
    GroupEnd,
    Left,
    Stopped,
    Superseded,
    Trained,
)

if TYPE_CHECKING:
    from spotune_trainer.data.preparation.prepare import PrepareProgress

logger = logging.getLogger("spotune.driver")

_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0
"""Wait so long for all workers that are wanted before starting with fewer."""


class StoppedError(InfrastructureError):
    """The run was told to stop; its state is committed."""


@dataclass(frozen=True)
class Surroundings:
    """What a driver needs of Ray and of time.

    Attributes:
        agents: those on the cluster's nodes.
        clock: seconds, monotonic.
        sleep: waits for some seconds.
    """

    agents: GroupAgents
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Driver:
    """Runs worker groups of one job until the model is trained or nothing more can be done."""

    def __init__(self, directory: JobDirectory, job: FinetuneJob, attempt: int, surroundings: Surroundings) -> None:
        self.directory = directory
        self.job = job
        self.surroundings = surroundings
        self.ledger = Ledger(directory)
        self.monitor = Monitor(directory, self.ledger, attempt, trackers_of(job, directory))
        self._job_content: object = None
        self._refused: set[CheckpointName] = set()
        self._claimed: int | None = None
        self._patience_seconds = _PATIENCE_SECONDS

    def run(self) -> None:
        """Train to the end.

        Raises:
            JobError: the user has to change something.
            InfrastructureError: it may work another time; a stop that was asked for is one.
            SupersededError: a later generation of the job runs.
        """
        with self.monitor:
            try:
                record_lost_ends(self.ledger, self.directory)
                build_metrics(self.job.spec.training.evaluation)  # before data is prepared and workers are waited for
                with uploading(self.job, self.directory):
                    self._prepare()
                    while not self._run_generation():
                        pass
            except SpotuneError as error:
                self.monitor.update(Phase.FAILED if isinstance(error, JobError) else None, message=str(error))
                raise

    def _prepare(self) -> None:
        """Make shards of raw data, once; a killed preparation goes on where it was."""
        dataset = self.job.spec.dataset
        if dataset.prepare is None or dataset.train is not None:
            return
        from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
        from spotune_trainer.models.pretrained import load_tokenizer

        def report(done: PrepareProgress) -> None:
            self.monitor.update(
                message=f"prepared {done.documents:,} rows, {done.parts_done} of {done.parts_total} parts"
            )

        self.monitor.update(Phase.PREPARING, message=f"preparing {dataset.prepare.source}")
        options = PrepareOptions.of_job(self.job)
        prepare([dataset.prepare.source], self.directory.data / "train", options, load_tokenizer(self.job), report)

    def _run_generation(self) -> bool:
        """One worker group from plan to end; True when the model is trained."""
        self._take_in_job()
        world_size = self._wait_for_workers()  # the plan asks one of them how much memory it has
        started = time.monotonic()
        choice = choose_checkpoint(self.directory, self._refused)
        for torn in choice.skipped:
            self._skip(torn.name, torn.reason)
        plan = plan_run(self.job, self.directory, choice.checkpoint, self._worker_memory_bytes)
        plan_seconds = time.monotonic() - started
        self.monitor.startup("plan", plan_seconds)
        task = self._claim(choice.checkpoint, plan, world_size, plan_seconds)
        with self._watch_nodes(task, world_size) as watch:
            end = self.surroundings.agents.run_group(task, world_size)
        self.monitor.end()
        failed = isinstance(end, Failed | CorruptCheckpoint | Superseded)
        record_end(self.ledger, self.directory, task.generation, time.time(), failed=failed)
        return self._judge(end, plan, task, watch)

    def _take_in_job(self) -> None:
        """Go on with the job as it is in `job.json` by now, unless that trains something else."""
        content = files.read_json(self.directory.job)
        if content is None or content == self._job_content:
            return
        self._job_content = content
        job = job_of(self.directory)
        assert job is not None, "it has just been read"
        if changed := changed_fields(self.job, job):
            logger.warning("%s changed in job.json: going on with what was begun", ", ".join(changed))
        else:
            self.job = job

    def _wait_for_workers(self) -> int:
        clock = self.surroundings.clock
        started = clock()
        waiting = False
        while True:
            workers = self.job.spec.workers
            fewest, wanted = workers.min_world_size, workers.world_size
            room = self.surroundings.agents.muster(workers.gpus > 0)
            size = choose_world_size(room.ready, fewest, wanted, clock() - started, self._patience_seconds)
            if size is not None:
                self._patience_seconds = _PATIENCE_SECONDS
                return size
            if not waiting and room.nodes < wanted:  # otherwise they are being started
                waiting = True
                self.ledger.append("waiting", slots=room.nodes, wanted=wanted)
            self.monitor.update(
                Phase.WAITING_FOR_WORKERS,
                workers={"running": 0, "wanted": wanted},
                message=f"{room.ready} of {wanted} workers are there ({fewest} are needed)",
            )
            self._refuse_stop()
            self.surroundings.sleep(_POLL_SECONDS)
            self._take_in_job()

    def _claim(self, checkpoint: Checkpoint | None, plan: RunPlan, world_size: int, plan_seconds: float) -> WorkerTask:
        """Start the next generation from `checkpoint`, and say so.

        Raises:
            SupersededError: another driver has claimed one since this one did; it is the later of the two.
        """
        if self._claimed is not None and is_superseded(self.directory, self._claimed):
            self.ledger.append("superseded", generation=self._claimed)
            raise SupersededError(f"another driver of this job has started a generation after {self._claimed}")
        name = checkpoint.name if checkpoint else None
        lost, lost_seconds = self._steps_past(name), seconds_lost(self.directory, name.step if name else 0)
        generation = claim(self.directory, name)
        self._claimed = generation.number
        self.ledger.append(
            "generation-started",
            generation=generation.number,
            restoredFrom=str(name) if name else None,
            step=generation.first_step,
            stepsLost=lost,
            secondsLost=lost_seconds,
            planSeconds=round(plan_seconds, 3),
            worldSize=world_size,
            zeroStage=plan.zero_stage,
            microBatchSize=plan.micro_batch_size,
        )
        self.monitor.begin(generation.number, generation.first_step, world_size)
        start = f"from {name}" if name else "from the beginning"
        logger.info("generation %d starts %s with %d workers", generation.number, start, world_size)
        return WorkerTask(
            directory=str(self.directory.root),
            generation=generation.number,
            restore=str(name) if name else None,
            job=self.job.model_dump(mode="json"),
            plan=plan.to_json(),
            seconds_to_preemption=seconds_to_preemption(self.ledger.worker_seconds(), self.ledger.workers_lost()),
            commit_seconds=self.ledger.last_commit_seconds(),
        )

    def _worker_memory_bytes(self) -> int:
        workers = self.job.spec.workers
        return self.surroundings.agents.worker_memory_bytes(workers.count, workers.gpus > 0)

    def _watch_nodes(self, task: WorkerTask, world_size: int) -> NodeWatch:
        return NodeWatch(
            self.directory.generation_logs(task.generation),
            world_size,
            lambda: job_of(self.directory) or self.job,
            self.surroundings.agents,
            partial(self.ledger.append, "leaving", generation=task.generation),
        )

    def _steps_past(self, restored: CheckpointName | None) -> int:
        """Steps that the newest generation trained after what the next one starts from."""
        generations = list_generations(self.directory)
        if not generations:
            return 0
        last = steps_done(self.directory, generations[-1].number, generations[-1].first_step)
        return max(0, last - (restored.step if restored else 0))

    def _judge(self, end: GroupEnd, plan: RunPlan, task: WorkerTask, watch: NodeWatch) -> bool:
        """Act on the end of a worker group; True when the model is trained."""
        match end:
            case Trained(figures):
                trained = self.job
                self._take_in_job()
                if training_length(self.job) != training_length(trained):
                    logger.info(
                        "trained as long as this worker group was asked to; the job asks for another length by now"
                    )
                    return False
                publish(self.job, self.directory, self.monitor.update)
                self._finish(figures)
                return True
            case Stopped():
                self.ledger.append("notice", generation=task.generation, step=self._last_step(task))
                raise StoppedError("stopped as asked; the state is committed, and the same command goes on from it")
            case Left() if not watch.preempted:
                self.ledger.append("left", generation=task.generation, step=self._last_step(task))
                self._patience_seconds = 0.0  # what there is room for is known
            case Left():
                self._retry(FailureCause.PREEMPTED, f"{watch.leaving_for}; the state is committed", plan, task)
            case Failed(FailureCause.WORKER_LOST, message) if watch.preempted:
                self._retry(FailureCause.PREEMPTED, message, plan, task)
            case Superseded(message):
                self.ledger.append("superseded", generation=task.generation)
                raise SupersededError(message)
            case CorruptCheckpoint(checkpoint, message):
                self._skip(CheckpointName.parse(checkpoint), message)
            case Failed(cause, message):
                self._retry(cause, message, plan, task)
        return False

    def _retry(self, cause: FailureCause, message: str, plan: RunPlan, task: WorkerTask) -> None:
        """Record the failure, and wait as long as the retry policy says.

        Raises:
            JobError, InfrastructureError: the policy gives up.
        """
        step = self._last_step(task)
        self.ledger.append("failure", generation=task.generation, cause=str(cause), message=message, step=step)
        logger.warning("generation %d ended at step %d (%s): %s", task.generation, step, cause, message)
        self.monitor.update(Phase.WAITING_FOR_WORKERS, restarts=self.ledger.restarts(), message=message)
        self._take_in_job()
        gpu_hours = self.ledger.worker_seconds() / 3600 if self.job.spec.workers.gpus else 0.0
        decision = decide(
            self.ledger.failures_since_change(),
            self.job.spec.retry,
            now=time.time(),
            can_use_less_memory=plan.can_use_less_memory,
            gpu_hours=gpu_hours,
        )
        if isinstance(decision, GiveUp):
            kind = JobError if decision.exit_code == JobError.exit_code else InfrastructureError
            raise kind(decision.reason)
        if decision.use_less_memory:
            save_plan(self.directory, plan.use_less_memory(step))
        until = self.surroundings.clock() + decision.after_seconds
        while self.surroundings.clock() < until:
            self._refuse_stop()
            self.monitor.update()
            self.surroundings.sleep(_POLL_SECONDS)

    def _finish(self, figures: dict[str, Any]) -> None:
        account = GoodputAccount(self.directory).figures(time.time())
        wall_seconds = round(sum(account["goodputParts"].values()), 3)
        epochs, max_steps = training_length(self.job)
        result = {
            **dict.fromkeys(("evalLoss", "exactMatch", "executionAccuracy")),
            "scores": {},
            **figures,
            "epochs": epochs,
            "maxSteps": max_steps,
            "wallSeconds": wall_seconds,
            **account,
            "restarts": sum(self.ledger.restarts().values()),
            "export": str(self.directory.export),
        }
        files.write_json(self.directory.result, result)
        self.ledger.append("finished", step=figures["steps"], wallSeconds=wall_seconds, **account)
        logger.info("trained: %s", result)
        self.monitor.update(Phase.DONE, message=None, etaSeconds=0.0)

    def _skip(self, name: CheckpointName, reason: str) -> None:
        """Pass over a checkpoint that cannot be used, and say so, once."""
        if name in self._refused:
            return
        self._refused.add(name)
        self.ledger.append("checkpoint-skipped", checkpoint=str(name), reason=reason)
        message = f"checkpoint {name} cannot be used ({reason}); going on from the one before"
        logger.warning(message)
        self.monitor.update(message=message)

    def _last_step(self, task: WorkerTask) -> int:
        first = CheckpointName.parse(task.restore).step if task.restore else 0
        return steps_done(self.directory, task.generation, first)

    def _refuse_stop(self) -> None:
        """End the waiting when the run is told to stop: there is nothing to commit."""
        notice = files.read_json(self.directory.notice)
        if notice is not None and notice["stop"]:
            raise StoppedError(
                "stopped as asked while waiting for workers; the same command goes on from the last commit"
            )


def run_attempt(driver: Driver) -> int:
    """Run a driver; its exit code."""
    try:
        driver.run()
    except SpotuneError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0
