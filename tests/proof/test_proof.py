"""Two schedules of the proof, with a kill of every process; `make proof` plays fifty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints, rank_file
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.checker import Evidence, findings
from tests.proof.evidence import gather
from tests.proof.injector import Performance
from tests.proof.prover import proof_job
from tests.proof.references import References
from tests.proof.schedules import Deed, Disturbance, Moment, Schedule
from tests.trainer.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ZERO_STAGE, EPOCHS = 2, 10


def blow(deed: Deed, moment: Moment, after_step: int, world_size: int = 2) -> Disturbance:
    return Disturbance(deed, moment, after_step, world_size, victim=0.5, delay=0.05)


KEEPS_ITS_WORLD_SIZE = (
    blow(Deed.KILL_WORKER, Moment.SAVE, 6),
    blow(Deed.KILL_SUPERVISOR, Moment.STEP, 17),
    blow(Deed.KILL_EVERYTHING, Moment.STEP, 27),
)
CHANGES_IT = (blow(Deed.KILL_DRIVER, Moment.STEP, 15, world_size=3),)


class Stage:
    """Plays schedules of two workers, and leaves nothing running."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.references = References(runs, self.job(2))
        self.played: list[Performance] = []

    def job(self, world_size: int) -> FinetuneJob:
        return proof_job(self.runs, ZERO_STAGE, world_size, EPOCHS)

    def play(
        self, disturbances: tuple[Disturbance, ...], on_restart: Callable[[JobDirectory], None] = lambda _: None
    ) -> tuple[Performance, Evidence, str]:
        """A performance, what is to be said of it, and the output of its last command."""
        schedule = Schedule(0, 2, ZERO_STAGE, disturbances)
        performance = Performance(self.runs.empty("played"), schedule, self.job, on_restart=on_restart)
        self.played.append(performance)
        code, output = performance.play()
        return performance, gather(performance.run.directory, self.references, ZERO_STAGE, code), output


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(Runs(tmp_path_factory.mktemp("proof")))
    yield made
    for performance in made.played:
        performance.end()


class FlippedBit:
    """Damages the newest checkpoint before the second restart of the command, when nothing else runs any more."""

    def __init__(self) -> None:
        self.restarts = 0
        self.damaged: Path | None = None

    def __call__(self, directory: JobDirectory) -> None:
        self.restarts += 1
        if self.restarts == 2:
            newest = [found for found in list_checkpoints(directory.checkpoints) if isinstance(found, Checkpoint)][-1]
            path = newest.path / rank_file(1)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
            self.damaged = newest.path


def test_whatever_is_killed_the_model_is_the_same_bit_for_bit(stage: Stage) -> None:
    flipped = FlippedBit()
    performance, evidence, output = stage.play(KEEPS_ITS_WORLD_SIZE, flipped)
    assert findings(evidence) == []
    (only,) = evidence.stretches
    assert only.same_bits, "the SHA-256 of the undisturbed run"
    assert [strike.disturbance for strike in performance.strikes] == list(KEEPS_ITS_WORLD_SIZE)
    assert performance.strikes[0].hit, "the worker was killed while it saved"
    assert set(evidence.causes) >= {"workerLost", "headLost"}
    assert flipped.damaged is not None
    assert flipped.damaged.name in output
    skipped = performance.run.events("checkpoint-skipped")
    assert [event["checkpoint"] for event in skipped] == [flipped.damaged.name]


def test_more_workers_after_a_lost_driver_have_the_losses_of_fewer(stage: Stage) -> None:
    _, evidence, _ = stage.play(CHANGES_IT)
    assert findings(evidence) == []
    assert [stretch.segment.world_size for stretch in evidence.stretches] == [2, 3]
