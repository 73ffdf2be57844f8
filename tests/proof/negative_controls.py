"""Negative controls: the trainer is really broken in one place, and the proof has to say so.

Each control goes on from a run that was killed after its eighth step had been committed, with a worker that is broken
(`broken.py`), a damaged checkpoint or a worker group that the fence does not hold; the oracle then judges what came of
it as it judges any disturbed run. No Ray is needed: the ranks are real, so are their checkpoints and their data.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import Generation, choose_checkpoint, claim
from spotune_trainer.checkpoint.layout import CheckpointName, list_checkpoints, rank_file
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.proof import broken_workers as broken
from tests.proof.checker import Evidence, findings
from tests.proof.evidence import gather
from tests.proof.references import PartWorker, References, train_part
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, make_task, train_rank

ZERO_STAGE = 2
COMMITTED, REACHED = 8, 10
_TWO, _THREE = Layout(2, ZERO_STAGE), Layout(3, ZERO_STAGE)


class UnfencedPart(broken.Unfenced, PartWorker):
    """Trains some steps, whatever has started since."""


def control_job(runs: Runs) -> FinetuneJob:
    """Twenty steps, ten of which can be compared after a restart at the eighth."""
    return runs.job(training={"epochs": 4}, checkpoint={"every": 4, "keepEverySteps": 1})


@dataclass
class Bench:
    """Where controls are made."""

    runs: Runs
    references: References

    def interrupted(self) -> JobDirectory:
        """A run of two workers that were killed after `REACHED` steps, of which `COMMITTED` are in a checkpoint."""
        whole = self.references.undisturbed(_TWO)
        assert whole.directory is not None
        directory = self.runs.empty("control")
        claim(directory, None)
        kept = str(CheckpointName(COMMITTED, 1))
        shutil.copytree(whole.directory.checkpoints / kept, directory.checkpoints / kept)
        steps = directory.generation_logs(1).steps
        steps.parent.mkdir(parents=True)
        lines = whole.directory.generation_logs(1).steps.read_text().splitlines(keepends=True)
        steps.write_text("".join(lines[:REACHED]))
        return directory

    def go_on(self, directory: JobDirectory, worker: type[Worker], layout: Layout = _TWO) -> None:
        """Train to the end from the newest checkpoint that counts, as the driver would have it done."""
        checkpoint = choose_checkpoint(directory).checkpoint
        assert checkpoint is not None
        self.train(directory, claim(directory, checkpoint.name), worker, layout)

    def train(self, directory: JobDirectory, generation: Generation, worker: type[Worker], layout: Layout) -> None:
        """Train a generation to the end."""
        task = make_task(directory, self.references.job, layout, generation)
        run_group(layout.world_size, train_rank, task, worker, timeout=600)

    def evidence(self, directory: JobDirectory) -> Evidence:
        """What came of it."""
        return gather(directory, self.references, ZERO_STAGE)


@dataclass(frozen=True)
class Control:
    """One fault.

    Attributes:
        name: what is broken, for people.
        caught_by: a regular expression that one of the findings has to match.
        bring_about: breaks a run; returns its directory.
    """

    name: str
    caught_by: str
    bring_about: Callable[[Bench], JobDirectory]


def run_control(control: Control, bench: Bench) -> list[str]:
    """What the oracle finds."""
    return findings(bench.evidence(control.bring_about(bench)))


def _by(worker: type[Worker], layout: Layout = _TWO) -> Callable[[Bench], JobDirectory]:
    """A restart with a broken worker."""

    def bring_about(bench: Bench) -> JobDirectory:
        directory = bench.interrupted()
        bench.go_on(directory, worker, layout)
        return directory

    return bring_about


def _torn_checkpoint(bench: Bench) -> JobDirectory:
    """The second half of a rank's file never reached the disk, and nobody looks."""
    directory = bench.interrupted()
    tear(directory.checkpoints / str(CheckpointName(COMMITTED, 1)))
    bench.go_on(directory, broken.TrustingWorker)
    return directory


def _zombie_commits(bench: Bench) -> JobDirectory:
    """A lost group lives on and commits, its successor is lost, too, and what the zombie committed is believed."""
    directory, job = bench.runs.empty("zombie"), bench.references.job
    zombie, successor = claim(directory, None), claim(directory, None)
    for generation, steps in ((successor, COMMITTED // 2), (zombie, COMMITTED)):
        task = make_task(directory, job, _TWO, generation)
        run_group(2, train_part, task, steps, UnfencedPart, timeout=600)
    newest = list_checkpoints(directory.checkpoints)[-1]
    bench.train(directory, claim(directory, newest.name), Worker, _TWO)
    return directory


def _zombie_exports(bench: Bench) -> JobDirectory:
    """A lost group lives on to the end and puts its model in the place of its successor's."""
    directory = bench.interrupted()
    zombie = claim(directory, CheckpointName(COMMITTED, 1))
    bench.go_on(directory, Worker)
    bench.train(directory, zombie, broken.Unfenced, Layout(1, ZERO_STAGE))
    return directory


def tear(checkpoint: Path) -> None:
    """Write zeros over the second half of a rank's file: its length reached the disk, its content did not."""
    path = checkpoint / rank_file(1)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


CONTROLS = (
    Control("cursor one sample too far", "trained on other samples", _by(broken.SampleTooFar)),
    Control("cursor one step too far", "trained on other samples", _by(broken.StepTooFar)),
    Control("first moment of a parameter not restored", "end with other bits", _by(broken.FirstMomentForgotten)),
    Control(
        "second moment of a parameter not restored, with a change of world size",
        "from that of 2 workers",
        _by(broken.SecondMomentForgotten, _THREE),
    ),
    Control("torn checkpoint trusted", "which is corrupt", _torn_checkpoint),
    Control("commit of a zombie generation believed", "of a superseded generation", _zombie_commits),
    Control("export by a zombie generation", "exported the model when it was superseded", _zombie_exports),
    Control("step count of the optimizer not restored", "have other losses", _by(broken.OptimizerStepForgotten)),
    Control("learning rate counted from the restart", "have other losses", _by(broken.RateFromRestart)),
    Control("dropout drawn by rank, with a change of world size", "from that of 2", _by(broken.DropoutByRank, _THREE)),
    Control("a micro-batch lost at a world size", "not every sample was trained", _by(broken.MicroBatchLost, _THREE)),
    Control("export of an older checkpoint", "end with other bits", _by(broken.OldExport)),
)
