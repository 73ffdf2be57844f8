"""`retry.maxGpuHours`: no new attempt starts once so many GPU hours are used, and none that trains is ended."""

from __future__ import annotations

import pytest

from spotune.errors import JobError
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import FoundGroup, GroupResult, Yielded
from tests.trainer.support.drivers import status
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import LOST, TRAINED, ScriptedGroup, SimulatedCluster

USED = r"2\.0 GPU hours used, retry\.maxGpuHours is 2: raise it to continue from the last checkpoint"


class KilledError(Exception):
    """The driver is killed."""


def use_two_hours(directory: JobDirectory) -> None:
    Ledger(directory).append("generation-ended", generation=0, worldSize=2, seconds=3600, steps=0, parts={})


def driver_on_gpus(runs: Runs, directory: JobDirectory, cluster: SimulatedCluster, max_gpu_hours: float = 2) -> Driver:
    job = runs.job(
        workers={"count": 2, "min": 1, "gpus": 1},
        execution={"microBatchSize": 4, "zeroStage": 1},
        retry={"maxGpuHours": max_gpu_hours},
    )
    return Driver(directory, job, 1, cluster.dependencies())


def left_group(runs: Runs, directory: JobDirectory) -> FoundGroup:
    """A group whose driver was killed, and which trains on. The hours are used up meanwhile."""

    def kill() -> None:
        raise KilledError

    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=6, commits=[4], before_exit=kill)])
    with pytest.raises(KilledError):
        driver_on_gpus(runs, directory, cluster).run()
    use_two_hours(directory)
    return FoundGroup(cluster.tasks[0], 2, 2, has_failed=False)


def test_a_new_driver_starts_no_group_once_the_gpu_hours_are_used(runs: Runs, directory: JobDirectory) -> None:
    use_two_hours(directory)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], slots=0)
    with pytest.raises(JobError, match=USED):
        driver_on_gpus(runs, directory, cluster).run()
    assert (cluster.tasks, cluster.now) == ([], 0), "it does not wait for workers either"
    assert status(directory)["phase"] == "Failed"


def test_a_new_driver_starts_a_group_once_the_limit_is_raised(runs: Runs, directory: JobDirectory) -> None:
    use_two_hours(directory)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)])
    driver_on_gpus(runs, directory, cluster, max_gpu_hours=3).run()
    assert cluster.sizes == [2]


def test_a_group_that_trains_on_without_its_driver_is_no_new_attempt(runs: Runs, directory: JobDirectory) -> None:
    left = left_group(runs, directory)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)], left_group=left)
    driver_on_gpus(runs, directory, cluster).run()
    assert cluster.tasks == [left.task]


def test_a_group_whose_workers_are_lost_with_its_driver_is_not_replaced(runs: Runs, directory: JobDirectory) -> None:
    left_group(runs, directory)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)])
    with pytest.raises(JobError, match=USED):
        driver_on_gpus(runs, directory, cluster).run()


@pytest.mark.parametrize(("result", "groups"), [(Yielded(), 2), (LOST, 1)])
def test_a_group_that_leaves_for_a_larger_one_is_replaced_but_a_lost_one_is_not(
    runs: Runs, directory: JobDirectory, result: GroupResult, groups: int
) -> None:
    first = ScriptedGroup(result, last_step=5, commits=[5], before_exit=lambda: use_two_hours(directory))
    cluster = SimulatedCluster([first, ScriptedGroup(TRAINED, last_step=10)])
    driver = driver_on_gpus(runs, directory, cluster)
    if groups == 1:
        with pytest.raises(JobError, match=USED):
            driver.run()
    else:
        driver.run()
    assert len(cluster.tasks) == groups
