"""A schedule of the proof with a kill of every process, and one with more workers; `make proof` runs eighty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints, rank_file
from spotune_trainer.job_directory.layout import JobDirectory
from tests.proof.checker import Evidence, findings
from tests.proof.evidence import collect_evidence
from tests.proof.injector import FaultInjector, left_behind
from tests.proof.prover import proof_job
from tests.proof.references import References
from tests.proof.schedules import Fault, FaultKind, InjectionPoint, Schedule
from tests.trainer.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ZERO_STAGE, EPOCHS = 2, 10


def fault(kind: FaultKind, point: InjectionPoint, after_step: int, world_size: int = 2) -> Fault:
    return Fault(kind, point, after_step, world_size, victim=0.5, delay=0.05)


KEEPS_ITS_WORLD_SIZE = (
    fault(FaultKind.KILL_WORKER, InjectionPoint.SAVE, 6),
    fault(FaultKind.KILL_SUPERVISOR, InjectionPoint.STEP, 17),
    fault(FaultKind.KILL_EVERYTHING, InjectionPoint.STEP, 27),
)
CHANGES_IT = (fault(FaultKind.KILL_DRIVER, InjectionPoint.STEP, 15, world_size=3),)


class ScheduleRunner:
    """Runs schedules of two workers and remembers their injectors for cleanup."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.references = References(runs, self.job(2))
        self.injectors: list[FaultInjector] = []

    def job(self, world_size: int) -> FinetuneJob:
        return proof_job(self.runs, ZERO_STAGE, world_size, EPOCHS)

    def run(
        self, faults: tuple[Fault, ...], on_restart: Callable[[JobDirectory], None] = lambda _: None
    ) -> tuple[FaultInjector, Evidence, str]:
        """Returns the injector, the evidence of its run, and the output of its last command."""
        schedule = Schedule(0, 2, ZERO_STAGE, faults)
        injector = FaultInjector(self.runs.empty("played"), schedule, self.job, on_restart=on_restart)
        self.injectors.append(injector)
        code, output = injector.execute()
        return injector, collect_evidence(injector.run.directory, self.references, ZERO_STAGE, code), output


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduleRunner]:
    made = ScheduleRunner(Runs(tmp_path_factory.mktemp("proof")))
    yield made
    for injector in made.injectors:
        injector.clean_up()


class FlippedBit:
    """Corrupts the newest checkpoint before the second restart of the command, while no other process runs."""

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


@pytest.mark.long  # `make proof` plays such schedules; test_supervise_ray.py kills everything once
def test_model_is_bit_identical_after_kills_and_a_corrupt_checkpoint(runner: ScheduleRunner) -> None:
    flipped = FlippedBit()
    injector, evidence, output = runner.run(KEEPS_ITS_WORLD_SIZE, flipped)
    assert findings(evidence) == []
    (only,) = evidence.compared
    assert only.same_bits, "the SHA-256 of the undisturbed run"
    assert [injection.fault for injection in injector.injections] == list(KEEPS_ITS_WORLD_SIZE)
    assert injector.injections[0].hit, "the worker was killed while it saved"
    assert left_behind(injector.run.directory) == []
    assert set(evidence.causes) >= {"workerLost", "headLost"}
    assert flipped.damaged is not None
    assert flipped.damaged.name in output
    skipped = injector.run.events("checkpoint-skipped")
    assert [event["checkpoint"] for event in skipped] == [flipped.damaged.name]


@pytest.mark.long  # test_resume.py covers changes of the world size without a Ray
def test_losses_continue_with_more_workers_after_a_lost_driver(runner: ScheduleRunner) -> None:
    _, evidence, _ = runner.run(CHANGES_IT)
    assert findings(evidence) == []
    assert [each.segment.world_size for each in evidence.compared] == [2, 3]
