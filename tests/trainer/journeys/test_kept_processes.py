"""A run whose ranks are killed, one even while the group recovers: the other processes stay, and so do the bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotune_trainer.checkpoint.generations import latest_generation
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.runs import Layout, Runs, sample_hashes, train_generation

pytestmark = pytest.mark.ray

WORKERS, ZERO_STAGE, EPOCHS = 3, 2, 16


@pytest.fixture
def run(runs: Runs) -> Iterator[LiveRun]:
    """Three CPU workers at ZeRO-2, with a commit every four steps."""
    job = runs.job(
        training={"epochs": EPOCHS},
        checkpoint={"every": 4},
        execution={"zeroStage": ZERO_STAGE, "microBatchSize": 3},
        workers={"count": WORKERS, "gpus": 0},
        retry={"backoff": {"initial": "500ms", "max": "1s"}},
    )
    made = LiveRun(runs.empty("kept"), job, {"SPOTUNE_KEEP_RANK_PROCESSES": "1"})
    yield made
    made.clean_up()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_processes_stay_after_two_kills_and_the_weights_are_those_of_an_undisturbed_run(
    run: LiveRun, runs: Runs
) -> None:
    undisturbed = runs.empty("undisturbed")
    expected = train_generation(undisturbed, run.job, Layout(WORKERS, ZERO_STAGE), timeout=300).summary

    run.start()
    run.wait_for_step(6)
    before = run.ranks()
    first = latest_generation(run.directory)
    kill(before[2])
    run.wait_until(lambda: latest_generation(run.directory) > first, "the next generation")
    run.wait_until(lambda: len(run.ranks()) == WORKERS, "the start of all ranks")
    recovering = run.ranks()
    assert {rank: recovering[rank] for rank in (0, 1)} == {rank: before[rank] for rank in (0, 1)}
    kill(recovering[1])
    run.wait_until(lambda: latest_generation(run.directory) > first + 1, "the generation after that")
    code, output = run.wait()

    assert code == 0, output
    assert sample_hashes(run.directory) == sample_hashes(undisturbed)
    assert run.result()["exportSha256"] == expected["exportSha256"]
