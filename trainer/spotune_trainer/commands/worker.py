"""One rank of a job with a command: the first rank of each node runs it, and the others wait for its end.

The command gets SIGTERM when the worker group has to leave. If its processes use `spotune_train`, they leave after
a checkpoint instead. The model is the last checkpoint that `spotune_train` has saved, or else what the program has
written to SPOTUNE_OUTPUT_DIR.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotune.errors import JobError
from spotune.formatting import duration
from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.commands.environment import FIELD, environment_of
from spotune_trainer.commands.exit_status import failure_of
from spotune_trainer.commands.folder_in_bucket import CheckpointFolder, pull_outputs, push_output
from spotune_trainer.commands.locate import missing_program
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.failures import ProgramError, RecordedError, recorded_failure
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask
from spotune_trainer.training.worker import TrainResult
from spotune_trainer.training_functions.checkpoints import files_of
from spotune_trainer.training_functions.export import export_model, learn_of_other_machines
from spotune_trainer.training_functions.notices import notices_of, read_notices
from spotune_trainer.training_functions.opening import folder_checkpoints
from spotune_trainer.training_functions.ranks import Ranks
from spotune_trainer.training_functions.reporting import reporting

logger = logging.getLogger("spotune.worker")

_POLL_SECONDS = 0.25
_TAIL_BYTES = 16 * 2**10


def run_command(task: WorkerTask, place: RankPlacement) -> TrainResult:
    """Take part as one rank: run the command, or wait for it. An exception is logged and recorded, then raised."""
    with reporting(task, place) as (job, reporter):
        rank = _CommandRank(task, job, place, reporter)
        result = rank.run() if place.local_rank == 0 else rank.follow()
        logger.info("rank %d ends: %s", place.rank, result.exit.value)
        return result


class _CommandRank:
    """A rank whose node runs a command."""

    def __init__(self, task: WorkerTask, job: FinetuneJob, place: RankPlacement, reporter: ProgressReporter) -> None:
        self.task = task
        self.job = job
        self.place = place
        self.reporter = reporter
        self._log = task.logs.worker(place.rank)
        self._bucket = bucket_of(task.job_directory)
        self._is_joined = self._has_signalled = False
        self._begin = 0
        self._last_output = time.monotonic(), 0

    def run(self) -> TrainResult:
        """Run the command to its end; on rank 0, then export the model.

        Raises:
            JobError: the command cannot be started, has failed by itself, or has left no model.
            ProgramError: it was lost, ran out of memory, hangs, or could not reach the other nodes.
        """
        if problem := missing_program(self.job):
            raise JobError(f"{FIELD}: {problem}")
        command = self.job.spec.training.command
        logger.info("runs %s", shlex.join(command))
        self.reporter.record_startup("import")
        self._begin = self._log.stat().st_size  # what follows is printed by the command
        self._last_output = time.monotonic(), self._begin
        with (
            self._own_checkpoints(),
            self._start(command) as process,
            self.reporter.stopwatch.measure(Part.PRODUCTIVE),
        ):
            try:
                status = self._wait(process)
            finally:
                assert process.stdin is not None
                process.stdin.close()  # whatever still runs is killed
        if self._is_joined:
            self.reporter.take_over()
        rank_exit = self._exit_of_group(status)
        if rank_exit is None and status != 0:
            raise self._recorded_failure() or failure_of(command[0], status, self._output())
        if self._bucket is not None and self.place.node != 0:
            output = self.task.job_directory.command_output(self.task.generation)
            push_output(self._bucket, output, self.task.generation, self.place.node, self.reporter.heartbeat)
        summary = self._finish() if rank_exit is None and self.place.rank == 0 else {}
        rank_exit = rank_exit or RankExit.TRAINED
        files.write_json(self.task.logs.command_result(self.place.node), {"exit": rank_exit.value})
        return TrainResult(rank_exit, summary)

    def follow(self) -> TrainResult:
        """Wait until the node's first rank has ended. If that fails, this process is killed."""
        while (result := files.read_json(self.task.logs.command_result(self.place.node))) is None:
            self.reporter.heartbeat()
            time.sleep(_POLL_SECONDS)
        return TrainResult(RankExit(result["exit"]), {})

    @contextmanager
    def _own_checkpoints(self) -> Iterator[None]:
        """With a bucket: have the checkpoints that the program keeps by itself here, and upload what it changes."""
        if self._bucket is None:
            yield
            return
        folder = self.task.job_directory.command_checkpoints
        heartbeat = self.reporter.heartbeat
        checkpoints = CheckpointFolder(self._bucket, folder, self.task.generation, self.place.node, heartbeat)
        checkpoints.pull()
        with checkpoints.uploaded():
            yield

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = environment_of(self.task, self.place, os.environ)
        keeper = [sys.executable, "-m", "spotune_trainer.commands.keeper", *command]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                keeper,
                cwd=self.job.spec.training.code or None,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the command, and pass notices on to it; returns its exit status.

        Raises:
            ProgramError: it shows no progress for longer than `retry.hangTimeout`.
        """
        while (status := process.poll()) is None:
            self._watch_progress()
            rank_exit, _ = read_notices(notices_of(self.task))
            if rank_exit is not None and not self._leaves_by_itself() and not self._has_signalled:
                logger.info("the worker group leaves: sends SIGTERM to the command")
                self._has_signalled = True
                self._signalled_exit = rank_exit
                process.send_signal(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)
        self._watch_progress()
        return status

    def _watch_progress(self) -> None:
        """Keep the watchdog from ending this process: those of a command that uses `spotune_train` have their own."""
        if not self._is_joined and self._joined_process() is not None:
            self._is_joined = True
            self.reporter.hand_over()
        self.reporter.heartbeat()
        now = time.monotonic()
        if self._is_joined:
            self._watch_exit(now)
            return
        if self.place.rank != 0:  # other nodes may print nothing
            return
        size = self._log.stat().st_size
        since, known = self._last_output
        if size != known:
            if known == self._begin:  # nothing else shows that a program without spotune_train has started
                self.reporter.set_phase(Phase.TRAINING)
            self._last_output = now, size
        elif now - since > self.job.spec.retry.hang_timeout.seconds:
            raise ProgramError(
                FailureCause.HANG,
                f"{FIELD} has printed nothing for {duration(now - since)}, longer than retry.hangTimeout: raise that, "
                "let the program print its progress, or call spotune_train.report",
            )

    def _watch_exit(self, now: float) -> None:
        """Watch a process whose own watchdog has ended, since its program has."""
        if not (self._joined_process() or {}).get("ended"):
            self._last_output = now, 0
        elif now - self._last_output[0] > self.job.spec.retry.hang_timeout.seconds:
            raise ProgramError(FailureCause.HANG, f"{FIELD} has ended its last step, and its processes do not exit")

    def _joined_process(self) -> dict[str, Any] | None:
        """What the node's first process has written, if it uses `spotune_train`."""
        return files.read_json(self.task.logs.command_process(self.place.node))

    def _leaves_by_itself(self) -> bool:
        """Whether the program leaves after its next checkpoint: it saves with `spotune_train`."""
        checkpoint = choose_checkpoint(self.task.job_directory).checkpoint
        if checkpoint is None:  # with a bucket, a node learns of those of others at its next start
            return self._is_joined and self.task.restore is not None
        return self._is_joined and not checkpoint.manifest.is_output

    def _exit_of_group(self, status: int) -> RankExit | None:
        """Why the command has left before its end; None if it has not."""
        if self._has_signalled:
            return self._signalled_exit
        rank_exit = (self._joined_process() or {}).get("exit")
        if rank_exit:
            return RankExit(rank_exit)
        if status != 0 and not self._is_joined:  # another node has seen the notice first, and its program has left
            return read_notices(notices_of(self.task))[0]
        return None

    def _recorded_failure(self) -> Exception | None:
        """What a process of this node that uses `spotune_train` has recorded; not if only its peers were lost."""
        first = self.place.rank
        found = [recorded_failure(self.task.logs, rank) for rank in range(first, first + self.place.local_world_size)]
        own = [failure for failure in found if failure and failure.cause != FailureCause.COMMUNICATION]
        return RecordedError(own[0]) if own else None

    def _output(self) -> str:
        """The end of what the command has printed."""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._begin, size - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _finish(self) -> dict[str, Any]:
        """Export the model, on rank 0.

        Raises:
            JobError: there is none, or the checkpoint that was saved last is not complete.
        """
        task, output = self.task, self.task.job_directory.command_output(self.task.generation)
        learn_of_other_machines(task.job_directory)
        saved = (self._joined_process() or {}).get("savedStep")
        chosen = choose_checkpoint(task.job_directory).checkpoint
        steps = surviving_steps(task.job_directory)
        step = max([int(line["step"]) for line in steps], default=0)
        if saved is not None:
            if chosen is None or chosen.name.step < saved:
                raise JobError(
                    f"{FIELD}: the checkpoint of step {saved} is not complete: call spotune_train.checkpoint.save with "
                    "wait=True before the program destroys its process group"
                )
            name = chosen.name
        else:
            if self._bucket is not None:
                pull_outputs(self._bucket, output, task.generation, self.place.nodes, self.reporter.heartbeat)
            if files_of(output, FIELD):
                name = self._commit(output, max(step, chosen.name.step if chosen is not None else 1))
            elif chosen is not None and chosen.manifest.is_output:  # of an earlier group, whose export was lost
                name = chosen.name
            else:
                raise JobError(
                    f"{FIELD} ended with exit status 0 and has left no model: write it to the folder "
                    "SPOTUNE_OUTPUT_DIR, or call spotune_train.checkpoint.save"
                )
        with self.reporter.stopwatch.measure(Part.EVALUATION):
            return export_model(task, name, max(step, name.step), self.reporter)

    def _commit(self, output: Path, step: int) -> CheckpointName:
        """Commit what the program has written as the last checkpoint."""
        alone = Ranks(0, 1, None, self.reporter.heartbeat)
        checkpoints = folder_checkpoints(self.task, self.job, self.reporter, alone)
        with checkpoints.heartbeats():
            return checkpoints.commit(step, output, self.reporter.sync, is_output=True).name
