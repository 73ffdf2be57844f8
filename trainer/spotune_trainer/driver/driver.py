"""The driver of one attempt: plan, run a worker group, handle its result, run the next one.

All state that outlives the driver is on the volume, so a new driver can continue after a lost one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotune.errors import JobError, SpotuneError, StoppedError, SupersededError
from spotune.fingerprint import changed_fields
from spotune.job import FinetuneJob
from spotune.plan.checkpoint_interval import seconds_to_preemption
from spotune.resize.leaving import DEFAULT_PATIENCE_SECONDS, Leave
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import (
    choose_checkpoint,
    is_newest,
    is_superseded,
    last_logged_step,
    steps_lost_after,
)
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.data.datasets import check_local_manifests
from spotune_trainer.driver.adoption import Adoption
from spotune_trainer.driver.bucket import DriverBucket
from spotune_trainer.driver.claiming import claim_from
from spotune_trainer.driver.planning import memory_copies, peer_copy_rate, plan_run, save_plan, unprepared_sources
from spotune_trainer.driver.preparation import prepare_sources
from spotune_trainer.driver.results import write_result
from spotune_trainer.driver.retrying import raise_if_gpu_hours_are_used, retry_after_failure
from spotune_trainer.driver.status_publisher import StatusPublisher
from spotune_trainer.driver.world_size.node_watch import NodeWatch
from spotune_trainer.driver.world_size.resizing import Resizing, RunningGroup, replacement_times
from spotune_trainer.driver.world_size.scaling import choose_world_size, waiting_message
from spotune_trainer.evaluation.harness import check_tasks
from spotune_trainer.evaluation.metrics import build_metrics
from spotune_trainer.export.hub import upload_checkpoints, upload_export
from spotune_trainer.job_directory.job import has_commits, job_of, training_length
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import raise_if_stopped
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.goodput_ledger import (
    productive_seconds_after,
    record_generation_ended,
    record_lost_generations,
)
from spotune_trainer.observability.tracking.services import create_trackers
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.result import (
    CorruptCheckpoint,
    Failed,
    FoundGroup,
    GroupResult,
    Stopped,
    Superseded,
    Trained,
    WorkerGroupRunner,
    Yielded,
)

logger = logging.getLogger("spotune.driver")

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class DriverDependencies:
    """The cluster and the clock of a driver; tests replace both.

    Attributes:
        agents: node agents of the cluster, which run the worker groups.
        clock: monotonic time in seconds.
        sleep: waits for a number of seconds.
    """

    agents: WorkerGroupRunner
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Driver:
    """Runs worker groups of one job until the model is trained, or until an error ends the attempt.

    Args:
        directory: of the job.
        job: as it was when the attempt started; changes of `job.json` are read between worker groups.
        attempt: number of this attempt, for `status.json`.
        dependencies: cluster and clock.
    """

    def __init__(
        self, directory: JobDirectory, job: FinetuneJob, attempt: int, dependencies: DriverDependencies
    ) -> None:
        self.directory = directory
        self.job = job
        self.dependencies = dependencies
        self.ledger = Ledger(directory)
        trackers, unfit = create_trackers(job, directory), dependencies.agents.unfit_nodes
        self.status = StatusPublisher(directory, self.ledger, attempt, trackers, unfit)
        self._bucket = DriverBucket(directory, self._wait_for_bucket, dependencies.sleep)
        self._job_content: object = None
        self._skipped_checkpoints: set[CheckpointName] = set()
        self._claimed_generation: int | None = None
        self._patience_seconds = DEFAULT_PATIENCE_SECONDS
        self._enough: int | None = None
        self._planned_minimum = 1
        self._is_resized = False  # the last group has left for one of another size, which is no new attempt
        self._replacements = replacement_times(self.ledger)

    def run(self) -> None:
        """Train until the model is trained and exported.

        Raises:
            JobError: the user has to change something.
            InfrastructureError: another attempt may succeed. Includes StoppedError: the run was stopped on request.
            SupersededError: another driver has started a later generation of the job.
        """
        adoption = Adoption(self.directory, self.ledger, self.dependencies.agents, self.status)
        with self.status:
            try:
                left = adoption.find(self.job.spec.workers, self.dependencies.clock, self.dependencies.sleep)
                record_lost_generations(self.ledger, self.directory, left.task.generation if left else None)
                # Fail early if a metric or a task cannot be loaded: before data preparation and the wait for workers.
                evaluation = self.job.spec.training.evaluation
                build_metrics(evaluation)
                if evaluation.harness is not None and not has_commits(self.directory):
                    check_tasks(evaluation.harness, evaluation.best)
                with upload_checkpoints(self.job, self.directory):
                    self._prepare()
                    trained = left is not None and self._finish_left_group(adoption, left)
                    while not trained:
                        trained = self._run_generation()
            except SpotuneError as error:
                self.status.update(Phase.FAILED if isinstance(error, JobError) else None, message=str(error))
                raise

    def _prepare(self) -> None:
        """Convert raw data to shards, once, and check the shards. A killed preparation resumes where it stopped."""
        if sources := unprepared_sources(self.job, self.directory):
            prepare_sources(self.job, self.directory, sources, self.ledger, self.status)
        if not self.job.spec.training.has_user_code:
            check_local_manifests(self.job, self.directory)
        self._bucket.upload_data()

    def _run_generation(self) -> bool:
        """Run one worker group, from plan to result. Returns True once the model is trained."""
        self._reload_job()
        if not self._is_resized:
            raise_if_gpu_hours_are_used(self.job, self.ledger)
        world_size = self._wait_for_workers()  # before the plan, which needs the memory of a worker
        started = time.monotonic()
        self._bucket.refresh()
        choice = choose_checkpoint(self.directory, self._skipped_checkpoints)
        for skipped in choice.skipped:
            self._skip_checkpoint(skipped.name, skipped.reason)
        choice.raise_if_all_are_lost()
        plan = plan_run(self.job, self.directory, choice.checkpoint, self._worker_memory_bytes)
        plan_seconds = time.monotonic() - started
        self._planned_minimum = plan.min_world_size
        if world_size < self._minimum():
            world_size = self._wait_for_workers()
        self.status.record_startup("plan", plan_seconds)
        self._bucket.upload_plan()
        self._bucket.refresh()
        if not is_newest(self.directory, choice.checkpoint, self._skipped_checkpoints):
            return False
        task = self._claim(choice.checkpoint, plan, world_size, plan_seconds)
        if task is None:
            return False
        return self._finish_group(task, plan, world_size, lambda: self.dependencies.agents.run_group(task, world_size))

    def _finish_left_group(self, adoption: Adoption, group: FoundGroup) -> bool:
        """Wait for the worker group of an earlier driver, and handle its result. Returns True once it is trained."""
        task, plan = group.task, RunPlan.from_json(group.task.plan)
        self._claimed_generation, self._planned_minimum = task.generation, plan.min_world_size
        return self._finish_group(task, plan, group.world_size, lambda: adoption.result(group))

    def _finish_group(self, task: WorkerTask, plan: RunPlan, world_size: int, run: Callable[[], GroupResult]) -> bool:
        """Watch over a worker group until `run` returns, and handle its result. Returns True once it is trained."""
        with self._watch_nodes(task, world_size) as watch:
            result = run()
        self.status.finish_generation()
        failed = isinstance(result, Failed | CorruptCheckpoint | Superseded)
        record_generation_ended(self.ledger, self.directory, task.generation, time.time(), failed=failed)
        return self._handle_result(result, plan, task, watch)

    def _reload_job(self) -> None:
        """Read `job.json` again if it has changed. A change of what is trained (the fingerprint) is ignored."""
        content = files.read_json(self.directory.job)
        if content is None or content == self._job_content:
            return
        self._job_content = content
        job = job_of(self.directory)
        assert job is not None, "job.json has just been read"
        if changed := changed_fields(self.job, job):
            logger.warning(
                "%s changed in job.json: ignored, the run continues with the previous job", ", ".join(changed)
            )
        else:
            self.job = job

    def _wait_for_workers(self) -> int:
        """Wait until enough workers are ready. Returns the world size of the next group."""
        clock = self.dependencies.clock
        started = clock()
        waiting = False
        while True:
            workers = self.job.spec.workers
            minimum, desired = self._minimum(), workers.world_size
            reason = " for the memory of the model" if minimum > workers.min_world_size else ""
            slots = self.dependencies.agents.ensure(workers.gpus > 0)
            self._replacements.observe(nodes=slots.nodes, ready=slots.imported, desired=desired, now=clock())
            waited, patience = clock() - started, self._patience_seconds
            if slots.nodes > slots.ready:  # a node has joined, and will be ready soon
                patience = max(patience, DEFAULT_PATIENCE_SECONDS)
            size = choose_world_size(slots.ready, minimum, desired, waited, patience, self._enough)
            if size is not None:
                self._patience_seconds, self._enough = DEFAULT_PATIENCE_SECONDS, None
                return size
            if not waiting and slots.nodes < desired:  # with enough slots, agents are only starting
                waiting = True
                self.ledger.append("waiting", slots=slots.nodes, wanted=desired)
            self.status.update(
                Phase.WAITING_FOR_WORKERS,
                workers={"running": 0, "wanted": desired},
                message=waiting_message(slots.ready, minimum, desired, reason, self.dependencies.agents.unfit_nodes()),
            )
            raise_if_stopped(self.directory)
            self.dependencies.sleep(_POLL_SECONDS)
            self._reload_job()

    def _minimum(self) -> int:
        """Number of workers that the next group needs.

        Raises:
            JobError: `workers.count` is too low for it.
        """
        workers = self.job.spec.workers
        minimum = self._planned_minimum if workers.min == "auto" else workers.min_world_size
        if minimum > workers.world_size:
            raise JobError(
                f"workers.count: the model needs the memory of {minimum} workers, and {workers.world_size} are asked "
                "for: raise it, or set workers.min to a number to try it with fewer"
            )
        return minimum

    def _claim(
        self, checkpoint: Checkpoint | None, plan: RunPlan, world_size: int, plan_seconds: float
    ) -> WorkerTask | None:
        """Claim the next generation, which starts from `checkpoint`, and record it in the ledger; None as `claim_from`.

        Raises:
            SupersededError: another driver has claimed a generation after the last one of this driver.
        """
        last = self._claimed_generation
        if last is not None and self._bucket.when_reachable(lambda: is_superseded(self.directory, last)):
            self.ledger.append("superseded", generation=last)
            raise SupersededError(f"another driver of this job has started a generation after {last}")
        restored, step = (str(checkpoint.name), checkpoint.name.step) if checkpoint else (None, 0)
        lost, lost_seconds = steps_lost_after(self.directory, step), productive_seconds_after(self.directory, step)
        generation = claim_from(self.directory, self._bucket, checkpoint, self._skipped_checkpoints)
        if generation is None:
            return None
        self._claimed_generation = generation.number
        self.ledger.append(
            "generation-started",
            generation=generation.number,
            restoredFrom=restored,
            step=generation.first_step,
            stepsLost=lost,
            secondsLost=lost_seconds,
            planSeconds=round(plan_seconds, 3),
            worldSize=world_size,
            **plan.layout,
        )
        self.status.start_generation(generation.number, generation.first_step, world_size)
        start = restored or "the beginning"
        logger.info("generation %d starts from %s with %d workers", generation.number, start, world_size)
        return WorkerTask(
            directory=str(self.directory.root),
            generation=generation.number,
            restore=restored,
            job=self.job.model_dump(mode="json"),
            plan=plan.to_json(),
            seconds_to_preemption=seconds_to_preemption(self.ledger.worker_seconds(), self.ledger.workers_lost()),
            commit_seconds=self.ledger.last_commit_seconds(),
            memory_copies=memory_copies(self.job, plan, world_size),
            peer_copy_rate=peer_copy_rate(self.job, plan, world_size),
        )

    def _worker_memory_bytes(self) -> int:
        workers = self.job.spec.workers
        return self.dependencies.agents.worker_memory_bytes(workers.count, workers.gpus > 0)

    def _watch_nodes(self, task: WorkerTask, world_size: int) -> NodeWatch:
        group = RunningGroup(task.generation, task.logs, world_size, self._planned_minimum)
        return NodeWatch(
            Resizing(group, self.ledger, self._replacements),
            lambda: job_of(self.directory) or self.job,
            self.dependencies.agents,
            partial(self._record_decision, task.generation),
            self.dependencies.clock,
        )

    def _record_decision(self, generation: int, event: str, **values: Any) -> None:
        """Record a decision about the running group in the ledger and, if it is to leave, in the status."""
        self.ledger.append(event, generation=generation, **values)
        if event == "leaving":
            self.status.update(message=": ".join(filter(None, (values["reason"], values.get("why")))))

    def _handle_result(self, result: GroupResult, plan: RunPlan, task: WorkerTask, watch: NodeWatch) -> bool:
        """Act on the result of a worker group. Returns True once the model is trained."""
        self._is_resized = isinstance(result, Yielded) and not watch.preempted
        match result:
            case Trained(summary):
                trained = self.job
                self._reload_job()
                if training_length(self.job) != training_length(trained):
                    logger.info(
                        "all steps are done, but the training length in job.json has changed: starting another group"
                    )
                    return False
                upload_export(self.job, self.directory, self.status.update)
                message = write_result(self.directory, self.ledger, self.job, summary)
                self.status.update(Phase.DONE, message=message, etaSeconds=0.0)
                return True
            case Stopped():
                self.ledger.append("notice", generation=task.generation, step=self._last_step(task))
                raise StoppedError("stopped on request; the state is committed, and the same command resumes from it")
            case Yielded() if self._is_resized:
                self.ledger.append("left", generation=task.generation, step=self._last_step(task))
                self._patience_seconds = 0.0  # the number of slots is known: do not wait for more
            case Yielded():
                self._wait_as_decided(watch)
                self._retry(Failed(FailureCause.PREEMPTED, f"{watch.yield_reason}; the state is committed"), plan, task)
            case Failed(FailureCause.WORKER_LOST, message) if watch.preempted:
                self._wait_as_decided(watch)
                early = watch.deadline is not None and time.time() < watch.deadline
                self._retry(Failed(FailureCause.PREEMPTED, message), plan, task, beforeDeadline=early)
            case Superseded(message):
                self.ledger.append("superseded", generation=task.generation)
                raise SupersededError(message)
            case CorruptCheckpoint(checkpoint, message):
                self._skip_checkpoint(CheckpointName.parse(checkpoint), message)
            case Failed():
                self._retry(result, plan, task)
        return False

    def _wait_as_decided(self, watch: NodeWatch) -> None:
        """Let the next group wait for as many workers as the last one had, if that was weighed."""
        if watch.decision is not None and watch.decision.choice is not Leave.DEFAULT:
            self._enough, self._patience_seconds = watch.world_size, watch.decision.patience_seconds

    def _retry(self, failed: Failed, plan: RunPlan, task: WorkerTask, **values: Any) -> None:
        """Record the failure with further `values`, and wait for the backoff of the retry policy.

        Raises:
            JobError, InfrastructureError: the policy gives up.
        """
        step = self._last_step(task)
        record = {"cause": str(failed.cause), "message": failed.message, "step": step, **values}
        self.ledger.append("failure", generation=task.generation, **record)
        logger.warning("generation %d ended at step %d (%s): %s", task.generation, step, failed.cause, failed.message)
        self.status.update(Phase.WAITING_FOR_WORKERS, restarts=self.ledger.restarts(), message=failed.message)
        self._reload_job()
        decision = retry_after_failure(self.job, self.ledger, plan, failed.evaluation_batch)
        if decision.use_less_memory:
            save_plan(self.directory, plan.use_less_memory(step, failed.evaluation_batch))
        deadline = self.dependencies.clock() + decision.after_seconds
        while self.dependencies.clock() < deadline:
            raise_if_stopped(self.directory)
            self.status.update()
            self.dependencies.sleep(_POLL_SECONDS)

    def _skip_checkpoint(self, name: CheckpointName, reason: str) -> None:
        """Skip a checkpoint that cannot be used. Recorded once for each checkpoint."""
        if name in self._skipped_checkpoints:
            return
        self._skipped_checkpoints.add(name)
        self.ledger.append("checkpoint-skipped", checkpoint=str(name), reason=reason)
        message = f"checkpoint {name} cannot be used ({reason}); it is skipped"
        logger.warning(message)
        self.status.update(message=message)

    def _last_step(self, task: WorkerTask) -> int:
        first = CheckpointName.parse(task.restore).step if task.restore else 0
        return last_logged_step(self.directory, task.generation, first)

    def _wait_for_bucket(self, message: str) -> None:
        self.status.update(message=message)
        raise_if_stopped(self.directory)
