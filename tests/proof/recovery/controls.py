"""Negative controls of recovery: memory holds other bytes than those that were committed, and a defect believes them.

Those without Ray resume an interrupted run with files in memory that a control has chosen. Each has a counterpart, in
which the intact trainer finds the same files and must have no findings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.restore import DamagedMemoryError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.proof import broken_memory
from tests.proof.broken_memory import flipped, held_files
from tests.proof.negative_controls import COMMITTED, ZERO_STAGE, Control, ControlBench
from tests.proof.recovery.prover import RecoveryControl
from tests.proof.recovery.schedules import Target
from tests.proof.references import PartialRunWorker, train_steps
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.runs import Layout, make_task

_TWO = Layout(2, ZERO_STAGE)
_LAST = CheckpointName(COMMITTED, 1)
_OTHER_MICRO_BATCH = 2
"""A group with it computes the same losses in another order, so its commits differ in their last bits."""

Content = Callable[[ControlBench, JobDirectory], None]
"""Fills `held_files` of a run."""


@dataclass(frozen=True)
class HeldFiles:
    """What memory holds in place of the last commit.

    Attributes:
        fill: writes the files.
        at_peer: whether another node holds them.
    """

    name: str
    fill: Content
    at_peer: bool

    @property
    def trusting(self) -> type[Worker]:
        """The worker that believes them."""
        return broken_memory.TrustingPeerMemoryWorker if self.at_peer else broken_memory.TrustingMemoryWorker

    @property
    def intact(self) -> type[Worker]:
        """The worker that verifies them."""
        return broken_memory.PeerMemoryWorker if self.at_peer else broken_memory.MemoryWorker

    def resume(self, bench: ControlBench, worker: type[Worker]) -> JobDirectory:
        """Resume an interrupted run of two workers.

        A group that finds its own memory damaged ends, and another one follows.
        """
        directory = bench.interrupted_run()
        self.fill(bench, directory)
        try:
            bench.resume(directory, worker)
        except GroupFailedError as error:
            if DamagedMemoryError.__name__ not in str(error):
                raise
            bench.resume(directory, Worker)
        return directory

    def control(self) -> Control:
        """The negative control."""
        return Control(self.name, "end with different bits", lambda bench: self.resume(bench, self.trusting))


def _earlier_commit(bench: ControlBench, directory: JobDirectory) -> None:
    shutil.copytree(_undisturbed(bench).checkpoints / str(CheckpointName(COMMITTED - 1, 1)), held_files(directory))


def _other_generation(bench: ControlBench, directory: JobDirectory) -> None:
    """The commit of the same step by another generation, whose bits differ."""
    other = bench.runs.empty("other-generation")
    task = make_task(other, bench.references.job, _TWO, claim(other, None), _OTHER_MICRO_BATCH)
    run_group(2, train_steps, task, COMMITTED, PartialRunWorker, timeout=600)
    shutil.copytree(other.checkpoints / str(_LAST), held_files(directory))


def _damaged(bench: ControlBench, directory: JobDirectory) -> None:
    _write(bench, directory, lambda content, _: flipped(content))


def _half_copied(bench: ControlBench, directory: JobDirectory) -> None:
    """The first half is that of the last commit, the second one still that of the commit before."""
    _write(bench, directory, lambda content, earlier: content[: len(content) // 2] + earlier[len(content) // 2 :])


def _write(bench: ControlBench, directory: JobDirectory, change: Callable[[bytes, bytes], bytes]) -> None:
    commits = _undisturbed(bench).checkpoints
    held_files(directory).mkdir()
    for path in (commits / str(_LAST)).glob("*.safetensors"):
        earlier = commits / str(CheckpointName(COMMITTED - 1, 1)) / path.name
        (held_files(directory) / path.name).write_bytes(change(path.read_bytes(), earlier.read_bytes()))


def _undisturbed(bench: ControlBench) -> JobDirectory:
    directory = bench.references.undisturbed(_TWO).directory
    assert directory is not None
    return directory


HELD_FILES = (
    HeldFiles("segments of an earlier commit trusted", _earlier_commit, at_peer=False),
    HeldFiles("checksum of a segment not verified", _damaged, at_peer=False),
    HeldFiles("copy of another generation accepted", _other_generation, at_peer=True),
    HeldFiles("checksum of a copy not verified", _damaged, at_peer=True),
    HeldFiles("half-copied commit used", _half_copied, at_peer=True),
)
RANK_CONTROLS = tuple(held.control() for held in HELD_FILES)
"""Without Ray."""

LIVE_CONTROLS = (
    RecoveryControl(
        "checksum of a segment not verified", "DamagedMemoryTrusted", "end with different bits", Target.RANK
    ),
    RecoveryControl("checksum of a copy not verified", "DamagedCopyTrusted", "end with different bits", Target.NODE),
)
"""In the whole product, with a kill."""
