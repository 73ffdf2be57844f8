"""A run whose driver is killed, and then its Ray head: its ranks train on, and it ends as an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.observability.surviving_workers import WORKERS_TRAIN_ON
from spotune_trainer.supervisor.ray_head.local import process_marker
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id
from tests.proof.injected import injected_path
from tests.proof.injected.slow_volume import VOLUME, Latency, set_latency
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout, Runs, sample_hashes, train_generation

pytestmark = pytest.mark.ray

WORKERS, ZERO_STAGE, EPOCHS = 2, 2, 14
_PACE = Latency(step=2.0)
"""The group trains for longer than two drivers need to start."""


@pytest.fixture
def run(runs: Runs) -> Iterator[LiveRun]:
    """Two CPU workers at ZeRO-2; only the last step is committed, so a group that starts again begins at step 0."""
    job = runs.job(
        training={"epochs": EPOCHS},
        checkpoint={"every": 100_000},
        execution={"zeroStage": ZERO_STAGE, "microBatchSize": 3},
        workers={"count": WORKERS, "gpus": 0},
        retry={"backoff": {"initial": "500ms", "max": "1s"}},
    )
    directory = runs.empty("lost-head")
    made = LiveRun(directory, job, {"PYTHONPATH": injected_path(), VOLUME: str(directory.root)})
    set_latency(directory.root, _PACE)
    yield made
    made.clean_up()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_train_on_while_driver_and_head_are_replaced(run: LiveRun, runs: Runs) -> None:
    undisturbed = runs.empty("undisturbed")
    expected = train_generation(undisturbed, run.job, Layout(WORKERS, ZERO_STAGE), timeout=300).summary

    run.start()
    run.wait_for_step(6)
    ranks = run.ranks()
    kill(run.driver())
    run.wait_until(lambda: len(run.events("adopted")) == 1, "a driver that adopts the group")
    run.kill_ray()
    run.wait_until(lambda: len(run.events("adopted")) == 2, "a driver on another head that adopts the group")
    assert run.ranks() == ranks, "the test is too short: the group has ended"
    set_latency(run.directory.root, Latency(step=0.0))
    code, output = run.wait()

    assert code == 0, output
    assert WORKERS_TRAIN_ON in output
    assert latest_generation(run.directory) == 1
    assert run.result()["exportSha256"] == expected["exportSha256"]
    assert sample_hashes(run.directory) == sample_hashes(undisturbed)
    assert [event["step"] for event in run.events("committed")] == [EPOCHS * STEPS_PER_EPOCH]
    assert [failure["cause"] for failure in run.events("failure")] == ["headLost", "headLost"]
    assert ProcessFamily(None, boot_id(), process_marker(run.directory.root)).members() == []
