"""Five faults on one job, one after the other; it ends with the model of an undisturbed run.

All faults, each on a job of its own: `make faults`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster.faults import control_plane, pods, processes
from tests.cluster.faults.harness import Scene
from tests.cluster.finetune_jobs import ENDLESS, Remains, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

FAULTS = (
    processes.worker_process_killed,
    pods.head_pod_deleted,
    processes.supervisor_killed,
    control_plane.operator_killed_at_random_moments,
    control_plane.operator_upgraded_and_rolled_back,
)


@pytest.fixture(scope="module")
def scene(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[Scene]:
    """A job that all tests of this module disturb."""
    cluster.machine_for("kill -9 of a container")
    with workplace.running(workplace.manifest("disturbed", training={"maxSteps": ENDLESS})) as job:
        yield Scene(cluster, Fault(cluster), operator, job)


@pytest.mark.parametrize("inflict", FAULTS, ids=lambda inflict: inflict.__name__)
def test_training_goes_on(inflict: Callable[[Scene], None], scene: Scene) -> None:
    inflict(scene)


def test_model_samples_and_status_are_as_if_nothing_had_happened(
    scene: Scene, undisturbed: Callable[[int], Remains], tmp_path: Path
) -> None:
    assert len(scene.strikes) == len(FAULTS), "a fault before was not survived"
    scene.job.give_an_end()
    scene.finish(undisturbed, tmp_path)
