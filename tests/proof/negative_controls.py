"""Negative controls: each breaks the trainer in one place, and the checker must find it.

A control resumes a run that was killed after step 8 was committed. It uses a broken worker (`broken_workers.py`), a
damaged checkpoint, or a worker group that ignores the fence. The checker then judges the result like any other run.
No Ray is needed: the ranks, their checkpoints and their data are real.
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
from tests.proof import broken_workers
from tests.proof.checker import Evidence, findings
from tests.proof.evidence import collect_evidence
from tests.proof.mixtures import mixture_job
from tests.proof.references import PartialRunWorker, References, copy_reference, train_steps
from tests.trainer.support.groups import run_group
from tests.trainer.support.labelled import labelled_job
from tests.trainer.support.preference import preference_job
from tests.trainer.support.runs import Layout, Runs, make_task, train_rank

ZERO_STAGE = 2
COMMITTED, REACHED = 8, 10
_TWO, _THREE = Layout(2, ZERO_STAGE), Layout(3, ZERO_STAGE)


class UnfencedPartialRun(broken_workers.Unfenced, PartialRunWorker):
    """Trains some steps, whatever has started since."""


def control_job(runs: Runs) -> FinetuneJob:
    """Twenty steps, ten of which can be compared after a restart at the eighth."""
    return runs.job(training={"epochs": 4}, checkpoint={"every": 4, "keepEverySteps": 1})


def mixture_control_job(runs: Runs) -> FinetuneJob:
    """The same with a mixture, whose sources change after 9 and 13 steps."""
    return mixture_job(runs, 20, checkpoint={"every": 4, "keepEverySteps": 1})


def preference_control_job(runs: Runs) -> FinetuneJob:
    """24 steps on pairs, by DPO."""
    return preference_job(runs.empty("pairs").root, "dpo", checkpoint={"every": 4, "keepEverySteps": 1})


def labels_control_job(runs: Runs) -> FinetuneJob:
    """24 steps on texts with labels, of a tiny BERT with a new head and dropout."""
    root = runs.empty("labels").root
    checkpoint = {"every": 4, "keepEverySteps": 1}
    return labelled_job(root, dropout=0.1, training={"learningRate": 1e-3}, checkpoint=checkpoint)


@dataclass
class ControlBench:
    """Creates and resumes the runs of negative controls."""

    runs: Runs
    references: References

    def interrupted_run(self) -> JobDirectory:
        """A run of two workers that were killed after `REACHED` steps, of which `COMMITTED` are in a checkpoint."""
        whole = self.references.undisturbed(_TWO)
        assert whole.directory is not None
        directory = self.runs.empty("control")
        claim(directory, None)
        kept = str(CheckpointName(COMMITTED, 1))
        shutil.copytree(whole.directory.checkpoints / kept, directory.checkpoints / kept)
        copy_reference(whole.directory.root, directory)
        steps = directory.generation_logs(1).steps
        steps.parent.mkdir(parents=True)
        lines = whole.directory.generation_logs(1).steps.read_text().splitlines(keepends=True)
        steps.write_text("".join(lines[:REACHED]))
        return directory

    def resume(self, directory: JobDirectory, worker: type[Worker], layout: Layout = _TWO) -> None:
        """Train to the end from the newest checkpoint that counts, as the driver would have it done."""
        checkpoint = choose_checkpoint(directory).checkpoint
        assert checkpoint is not None
        self.train(directory, claim(directory, checkpoint.name), worker, layout)

    def train(self, directory: JobDirectory, generation: Generation, worker: type[Worker], layout: Layout) -> None:
        """Train a generation to the end."""
        task = make_task(directory, self.references.job, layout, generation)
        run_group(layout.world_size, train_rank, task, worker, timeout=600)

    def evidence(self, directory: JobDirectory) -> Evidence:
        """The evidence of the run."""
        return collect_evidence(directory, self.references, ZERO_STAGE)


@dataclass(frozen=True)
class Control:
    """One negative control.

    Attributes:
        name: what is broken, for people.
        caught_by: a regular expression that one of the findings has to match.
        inject: breaks a run; returns its directory.
    """

    name: str
    caught_by: str
    inject: Callable[[ControlBench], JobDirectory]


def run_control(control: Control, bench: ControlBench) -> list[str]:
    """Inject the defect; returns the findings of the checker."""
    return findings(bench.evidence(control.inject(bench)))


def _by(worker: type[Worker], layout: Layout = _TWO) -> Callable[[ControlBench], JobDirectory]:
    """A restart with a broken worker."""

    def inject(bench: ControlBench) -> JobDirectory:
        directory = bench.interrupted_run()
        bench.resume(directory, worker, layout)
        return directory

    return inject


def _torn_checkpoint(bench: ControlBench) -> JobDirectory:
    """The second half of a rank's file never reached the disk, and no one verifies it."""
    directory = bench.interrupted_run()
    tear(directory.checkpoints / str(CheckpointName(COMMITTED, 1)))
    bench.resume(directory, broken_workers.TrustingWorker)
    return directory


def _stale_copies(bench: ControlBench) -> JobDirectory:
    """Another node passes off its copies of the commit before as those of the last one, and no one verifies them."""
    directory, whole = bench.interrupted_run(), bench.references.undisturbed(_TWO)
    assert whole.directory is not None
    earlier = whole.directory.checkpoints / str(CheckpointName(COMMITTED - 1, 1))
    shutil.copytree(earlier, broken_workers.stale_copies(directory))
    bench.resume(directory, broken_workers.PeerTrustingWorker)
    return directory


def _zombie_commits(bench: ControlBench) -> JobDirectory:
    """A lost group lives on and commits, its successor is lost, too, and what the zombie committed is believed."""
    directory, job = bench.runs.empty("zombie"), bench.references.job
    zombie, successor = claim(directory, None), claim(directory, None)
    for generation, steps in ((successor, COMMITTED // 2), (zombie, COMMITTED)):
        task = make_task(directory, job, _TWO, generation)
        run_group(2, train_steps, task, steps, UnfencedPartialRun, timeout=600)
    newest = list_checkpoints(directory.checkpoints)[-1]
    bench.train(directory, claim(directory, newest.name), Worker, _TWO)
    return directory


def _zombie_exports(bench: ControlBench) -> JobDirectory:
    """A lost group lives on to the end and puts its model in the place of its successor's."""
    directory = bench.interrupted_run()
    zombie = claim(directory, CheckpointName(COMMITTED, 1))
    bench.resume(directory, Worker)
    bench.train(directory, zombie, broken_workers.Unfenced, Layout(1, ZERO_STAGE))
    return directory


def tear(checkpoint: Path) -> None:
    """Write zeros over the second half of a rank's file: its length reached the disk, its content did not."""
    path = checkpoint / rank_file(1)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


CONTROLS = (
    Control("cursor one sample too far", "trained on different samples", _by(broken_workers.SampleTooFar)),
    Control("cursor one step too far", "trained on different samples", _by(broken_workers.StepTooFar)),
    Control(
        "first moment of a parameter not restored", "end with different bits", _by(broken_workers.FirstMomentForgotten)
    ),
    Control(
        "second moment of a parameter not restored, with a change of world size",
        "from that of 2 workers",
        _by(broken_workers.SecondMomentForgotten, _THREE),
    ),
    Control("torn checkpoint trusted", "which is corrupt", _torn_checkpoint),
    Control("stale copies in another node's memory trusted", "end with different bits", _stale_copies),
    Control("commit of a zombie generation believed", "of a superseded generation", _zombie_commits),
    Control("export by a zombie generation", "exported the model after it was superseded", _zombie_exports),
    Control(
        "step count of the optimizer not restored", "have different losses", _by(broken_workers.OptimizerStepForgotten)
    ),
    Control("learning rate counted from the restart", "have different losses", _by(broken_workers.RateFromRestart)),
    Control(
        "dropout drawn by rank, with a change of world size",
        "from that of 2",
        _by(broken_workers.DropoutByRank, _THREE),
    ),
    Control(
        "a micro-batch lost at a world size", "not every sample was trained", _by(broken_workers.MicroBatchLost, _THREE)
    ),
    Control("export of an older checkpoint", "end with different bits", _by(broken_workers.OldExport)),
)

MIXTURE_CONTROLS = (
    Control(
        "cursor of one source a draw too far", "other samples than the mixture has", _by(broken_workers.DrawTooFar)
    ),
    Control(
        "mixture begun again at a restart, with a change of world size",
        "other samples than the mixture has",
        _by(broken_workers.MixtureFromRestart, _THREE),
    ),
    Control(
        "stage of the mixture missed after a restart",
        "other samples than the mixture has",
        _by(broken_workers.StageMissed),
    ),
)

PREFERENCE_CONTROLS = (
    Control("cursor one sample too far, on pairs", "trained on different samples", _by(broken_workers.SampleTooFar)),
    Control(
        "trained model taken as the reference model after a restart",
        "have different losses",
        _by(broken_workers.TrainedReference),
    ),
)

LABELS_CONTROLS = (
    Control("head left out of the restored checkpoint", "have different losses", _by(broken_workers.HeadLeftOut)),
    Control(
        "head drawn from another seed at a restart, with a change of world size",
        "from that of 2 workers",
        _by(broken_workers.HeadDrawnAgain, _THREE),
    ),
)

CONTROL_JOBS = (
    (control_job, CONTROLS),
    (mixture_control_job, MIXTURE_CONTROLS),
    (preference_control_job, PREFERENCE_CONTROLS),
    (labels_control_job, LABELS_CONTROLS),
)
"""Each job with the controls that break its run."""
